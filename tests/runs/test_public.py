"""What a run writes to hand on, and the words on its seed."""

import json
import tomllib

import jax
import numpy as np
import pytest

from fedjaxsim.cli import main
from fedjaxsim.engine.part_checks import require_key
from fedjaxsim.privacy.assumptions import KNOWN_SEED, SECRET_SEED
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.execute import trained
from fedjaxsim.runs.public import _public_settings
from fedjaxsim.runs.settings import run_config
from fedjaxsim.runs.sweep_runs import expand_sweep

CLIENTS = [f"ward-{name}" for name in ("amber", "birch", "cedar", "dune", "elm", "fjord", "glen")]


def command(folder):
    """The words of a run whose data do not follow from its seed."""
    return f"""run --data csv:{folder}/patients.csv --client ward --target y --loss squared
        --range x=-4:4 --partition-seed 1 --algorithm ditto --sampling full --rounds 2
        --eval-every 1 --local-steps 1 --validation-fraction 0.3""".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a private run of named clients, with a secret seed and released metrics."""
    folder = tmp_path_factory.mktemp("public")
    rng = np.random.default_rng(0)
    rows = [
        f"{client},{x:.3f},{x + rng.normal():.3f}" for client in CLIENTS for x in rng.normal(size=8)
    ]
    (folder / "patients.csv").write_text("\n".join(["ward,x,y", *rows, ""]))
    private = """--seed secret --noise-multiplier 3 --evaluate-privately 2 --evaluation-largest 4
        --out"""
    assert main([*command(folder), *private.split(), f"{folder}/run"]) == 0
    return folder / "run"


def test_a_folder_to_hand_on_has_nothing_private(run):
    config, public = RunDirectory(run).config(), run / "public"
    state = trained(run).state
    texts = {path.name: path.read_bytes() for path in public.iterdir()}
    number = config["seed"].partition(":")[2]
    digests = [drawn.digest for drawn in RunDirectory(run).draws()]
    secrets = [number, *digests, *CLIENTS, str(run.parent)]
    secrets += [value for name, value in config["resolved"].items() if "fingerprint" in name]
    everything = b"".join(texts.values()).decode(errors="replace")
    assert not [secret for secret in secrets if secret in everything]
    assert len(number) > 9
    assert set(texts) == {
        "guarantee.json", "guarantee.txt", "metrics.jsonl", "model.npz", "settings.toml",
    }  # fmt: skip
    # The model is the server's state, of which no leaf has an axis of clients.
    with np.load(public / "model.npz") as model:
        leaves = [model[name] for name in model.files]
    for ours, theirs in zip(leaves, jax.tree.leaves(state.shared), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert len(CLIENTS) not in ours.shape


def test_text_for_a_reader_of_ones_own_may_be_a_path_and_stays(run):
    config = {**RunDirectory(run).config(), "data": "mycode:patients", "year": 2025}
    published = _public_settings(config | {"file": "/home/ann/patients.csv"})
    assert (published["data"], published["year"]) == ("mycode:patients", 2025)
    # Text has the names that parts of the package give it: those of the run, and others.
    assert (published["local_optimizer"], published["target"]) == ("sgd", ["y"])
    assert "file" not in published
    assert published["rounds"] == 2


def test_what_is_handed_on_states_the_guarantee_and_released_metrics_alone(run):
    public = run / "public"
    guarantee = json.loads((public / "guarantee.json").read_text())
    whole = RunDirectory(run).guarantee()
    assert guarantee == {k: v for k, v in whole.items() if k != "draws"}
    settings = tomllib.loads((public / "settings.toml").read_text())
    assert settings["data"] == "csv:patients.csv"
    assert settings["resolved"]["noise_multiplier"] == 3
    rows = [json.loads(line) for line in (public / "metrics.jsonl").read_text().splitlines()]
    assert {key for row in rows for key in row} == {"round", "private_loss"}


def test_only_a_drawn_seed_is_called_secret(run):
    [found] = RunDirectory(run).guarantee()["zero_out"]["joint_dp"].values()
    assert SECRET_SEED in found["assumptions"]
    assert KNOWN_SEED not in found["assumptions"]
    assert trained(run).experiment.config.has_secret_seed
    for seed in ({}, {"seed": 7}):
        assert not run_config(**seed).has_secret_seed
    config = run_config(seed="secret")
    assert run_config(**config.settings()).seed == config.seed != run_config(seed="secret").seed
    with pytest.raises(ValueError, match="share their seeds"):
        expand_sweep({"seed": "secret"}, [{"lam": [0.1, 1.0]}])
    assert main(["run", "--seed", "secret:5"]) == 2
    for seed in (5, 2**63):  # written by hand: a drawn one is larger than whoever guesses tries
        with pytest.raises(ValueError, match=f"seed secret:{seed} was not drawn"):
            run_config(seed=f"secret:{seed}")


def test_all_bits_of_a_large_seed_count():
    np.testing.assert_array_equal(jax.random.key_data(require_key(2**40 + 5)), [2**8, 5])
    np.testing.assert_array_equal(jax.random.key_data(require_key(5)), [0, 5])


@pytest.mark.thorough
def test_the_seed_that_is_named_is_the_one_that_noise_follows_from(run, tmp_path, capsys):
    settings = ["--epsilon", "8", "--seed", "3", "--out", str(tmp_path / "known")]
    assert main([*command(run.parent), *settings]) == 0
    assert "whoever guesses the seed (3) knows the noise" in capsys.readouterr().out


def test_an_older_run_is_exported_and_one_without_an_epsilon_is_not(run, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("of another run")
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    whole = (run / "metrics.jsonl").read_bytes()
    assert main(["export", str(run), "--out", str(run)]) == 2
    assert (run / "metrics.jsonl").read_bytes() == whole
    for path in (run / "public").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    capsys.readouterr()
    assert main([*command(run.parent), "--out", str(tmp_path / "plain")]) == 0
    assert f"files in {tmp_path / 'plain'}, all private\n" in capsys.readouterr().out
    assert not (tmp_path / "plain" / "public").exists()
    assert main(["export", str(tmp_path / "plain")]) == 2
    assert "no noise was added" in capsys.readouterr().err
