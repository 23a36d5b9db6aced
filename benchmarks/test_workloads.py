"""The fixed workloads, which are files of settings."""

import dataclasses

import growth
import jax
import numpy as np
import pytest
from common import WORKLOADS

from fedjaxsim.algorithms import SYSTEMS
from fedjaxsim.bench.results import Results
from fedjaxsim.bench.work import work_of
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings_files import read_toml

FILES = {path.stem: path for path in sorted(WORKLOADS.glob("*.toml"))}


def test_every_system_has_a_workload():
    kinds = {name: "linear" if system.linear else "mlp" for name, system in SYSTEMS.items()}
    assert {f"{kind}-{name}" for name, kind in kinds.items()} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_files_are_settings_of_runs_and_say_in_a_line_what_of(name):
    first, _, rest = FILES[name].read_text().partition("\n")
    assert first.startswith("# ")
    assert "#" not in rest
    config = read_toml(FILES[name])
    config.validate()
    assert config.rounds >= 10 * config.eval_every


@pytest.mark.thorough
@pytest.mark.parametrize("name", FILES)
def test_workloads_can_start_and_their_work_is_known(name):
    config = read_toml(FILES[name])
    small = {"clients": 10, "hidden": (4,), "shape": (8,)}
    small |= {"shape": (28, 28)} if config.model == "cnn" else {}
    # A file stays a file of its own parts, and has few clients and small models here.
    fields = {field.name for field in dataclasses.fields(config)}
    changes = {key: value for key, value in small.items() if key in fields and config.get(key)}
    experiment = prepare(config.replace(**changes))
    state = experiment.simulation.init(0, experiment.hparams)
    work = work_of(experiment, state)
    assert min(work) > 0
    assert work.cohort <= 10


def numbers(speed, state=1.0):
    return {
        "rounds_per_second": speed, "compile_seconds": 2.0, "gemm_fraction": 0.5,
        "memory_fraction": 0.25, "rounds_mb": 3.0, "state_mb": state,
    }  # fmt: skip


def test_points_of_growth_curves_are_files_of_settings(tmp_path):
    files = growth.write(tmp_path, list(growth.CURVES))
    assert len(files) == 4 + 5 + 4 + 4
    sizes = {path.stem: read_toml(path) for path in files}
    assert sizes["growth-steps-100"].get("local_steps") == 100
    assert sizes["growth-population-100000"].get("clients") == 100_000
    config = sizes["growth-parameters-985"].replace(clients=2)
    experiment = prepare(config)
    state = jax.eval_shape(lambda: experiment.simulation.init(0, experiment.hparams))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.personal)) == 2 * 985


def test_pictures_have_a_point_for_every_run():
    runs = {"growth-steps-1": [numbers(8.0)], "growth-steps-10": [numbers(2.0, 2.0)]}
    runs["tiny"] = [numbers(1000.0), numbers(3000.0)]
    results = Results({"processor": "some", "cores": 2}, {}, runs)
    speed, ceiling, compilation = growth.draw_runs(results).axes
    assert [label.get_text() for label in speed.get_yticklabels()] == ["tiny"]
    texts = [axes.texts[0].get_text() for axes in (speed, ceiling, compilation)]
    assert texts == ["2e+03", "50%", "2"]
    upper, lower = growth.draw_growth(results).axes
    for axes in (upper, lower):
        np.testing.assert_array_equal(axes.lines[0].get_xdata(), [1, 10])
