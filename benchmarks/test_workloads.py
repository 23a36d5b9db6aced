"""The fixed workloads, which are files of settings."""

import jax
import pytest
from common import WORKLOADS
from work import work_of

from fedjaxsim.algorithms import SYSTEMS
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings_files import read_toml

FILES = {path.stem: path for path in sorted(WORKLOADS.glob("*.toml"))}


def test_every_system_has_a_workload():
    kinds = {
        name: "linear" if system.linear else "mlp"
        for name, system in SYSTEMS.items()
        if not system.variant_of
    }
    assert {f"{kind}-{name}" for name, kind in kinds.items()} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_files_are_settings_of_runs_and_say_in_a_line_what_of(name):
    first, _, rest = FILES[name].read_text().partition("\n")
    assert first.startswith("# ")
    assert "#" not in rest
    config = read_toml(FILES[name])
    assert config.rounds >= 10 * config.eval_every


@pytest.mark.thorough
@pytest.mark.filterwarnings(
    "ignore:.* server state adds up the noise"
)  # in rounds of no use but time
@pytest.mark.parametrize("name", FILES)
def test_workloads_can_start_and_their_work_is_known(name):
    config = read_toml(FILES[name])
    small = {"clients": 10, "hidden": (4,), "shape": (8,)}
    small |= {"shape": (28, 28)} if config.model == "cnn" else {}
    # A file stays a file of its own parts, and has few clients and small models here.
    changes = {key: value for key, value in small.items() if config.get(key)}
    experiment = prepare(config.replace(**changes))
    init, hparams = experiment.simulation.program.init, experiment.hparams.as_arrays()
    state = jax.eval_shape(init, jax.random.key(0), hparams)
    work = work_of(experiment, state)
    assert min(work) > 0
    assert work.cohort <= 10
