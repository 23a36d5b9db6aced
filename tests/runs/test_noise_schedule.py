"""`--noise-schedule`: schedules of noise in a run, its stages, a sweep and a tuning."""

import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from fedjaxsim.cli import main
from fedjaxsim.privacy.accounting import gaussian
from fedjaxsim.privacy.guarantee import tight_epsilon
from fedjaxsim.privacy.schedule import Schedule
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.settings import RunConfig, run_config
from fedjaxsim.runs.sweep_runs import expand_sweep
from fedjaxsim.tuning.setup import set_up

M, T, DELTA = 6, 12, 1e-3
SMALL = {
    "data": "synthetic", "loss": "squared", "clients": M, "rounds": T, "local_steps": 1,
    "sampling_rate": 1.0, "algorithm": "fedavg", "delta": DELTA, "learning_rate": 0.01,
}  # fmt: skip
FLAGS = [
    word
    for name, value in SMALL.items()
    for word in (f"--{name.replace('_', '-')}", str(value))
] + ["--eval-every", "3", "--quiet"]  # fmt: skip
POWER = Schedule.parse("power:1")


def config(**changes) -> RunConfig:
    return run_config(**{**SMALL, **changes})


def exact(z) -> float:
    """ε of Gaussian rounds with full participation."""
    return gaussian.epsilon(DELTA, math.sqrt(np.sum(1 / np.asarray(z, np.float64) ** 2)))


def test_without_a_schedule_nothing_is_different():
    plain, named = config(epsilon=1.0), config(epsilon=1.0, noise_schedule="constant")
    assert "noise_schedule" not in plain.settings()
    one, other = prepare(plain), prepare(named)
    for found in (one, other):
        assert isinstance(found.hparams.noise_multiplier, float)
    assert one.hparams == other.hparams
    assert one.resolved()["resolved"] == other.resolved()["resolved"]
    assert "noise_first" not in one.resolved()["resolved"]


def test_a_target_is_met_by_the_whole_plan_of_a_pure_mechanism():
    plan = {"mechanism": "pure", "noise_schedule": "power:1"}
    found = prepare(config(epsilon=3.0, **plan))
    whole = tight_epsilon((found.planned(),), DELTA)
    assert 3 * 0.999 <= whole <= 3
    each = 1 / np.asarray(found.hparams.noise_multiplier, np.float64)
    np.testing.assert_allclose(each / each[0], np.arange(1, T + 1), rtol=1e-5)


def test_adaptive_clipping_counts_with_noise_for_the_loudest_round():
    found = prepare(config(mechanism="adaptive", noise_multiplier=2.0, noise_schedule="power:1"))
    assert found.hparams.count_noise == np.max(found.hparams.noise_multiplier)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run with a schedule, as a directory."""
    out = tmp_path_factory.mktemp("schedule") / "run"
    flags = ["--noise-multiplier", "3", "--noise-schedule", "power:1", "--out", str(out)]
    assert main(["run", *FLAGS, *flags]) == 0
    return out


def test_what_is_spent_at_every_evaluation_is_that_of_the_rounds_done(ran):
    z = POWER.noise(3.0, T)
    assert isinstance(z, np.ndarray)
    records = RunDirectory(ran).metrics()
    assert [record["round"] for record in records] == [0, 3, 6, 9, 12]
    for record in records[1:-1]:  # by RDP on the way
        tight = exact(z[: record["round"]])
        assert tight <= record["epsilon"] <= 1.2 * tight
    assert records[-1]["epsilon"] == pytest.approx(exact(z), rel=1e-9)
    # z is that constant noise multiplier which costs as much in the end, and not on the way.
    assert records[-1]["epsilon"] == pytest.approx(exact([3.0] * T), rel=1e-6)
    assert records[2]["epsilon"] < 0.8 * exact([3.0] * 6)
    summary = RunDirectory(ran).summary()
    assert summary["noise_multiplier"] == pytest.approx(3.0)
    resolved = RunDirectory(ran).config()["resolved"]
    assert (resolved["noise_first"], resolved["noise_last"]) == (float(z[0]), float(z[-1]))


@pytest.mark.thorough
def test_no_round_is_added_to_a_plan_but_a_stage_may_follow(ran, tmp_path, capsys):
    assert main(["resume", str(ran), "--rounds", "13"]) == 2
    error = capsys.readouterr().err
    assert "rounds must be at most 12 with noise-schedule power:1" in error
    out = tmp_path / "next"
    flags = ["--rounds", "4", "--noise-multiplier", "5", "--quiet", "--out", str(out)]
    # The first stage takes all places of the ledger.
    for shares, second in (("constant", [5.0] * 4), ("power:0.5", None)):
        again = [*flags, "--noise-schedule", shares, "--overwrite"]
        assert main(["run", "--from", str(ran), *again]) == 0
        second = Schedule.parse(shares).noise(5.0, 4) if second is None else second
        z = np.concatenate([np.asarray(POWER.noise(3.0, T)), np.asarray(second)])
        assert RunDirectory(out).summary()["epsilon"] == pytest.approx(exact(z), rel=1e-9)
    # An interrupted stage resumes with the ledger of both.
    again = [*flags, "--overwrite", "--noise-schedule", "power:0.5"]
    assert main(["run", "--from", str(ran), *again]) == 0
    (out / "summary.json").unlink()
    assert main(["resume", str(out), "--quiet"]) == 0
    assert RunDirectory(out).summary()["epsilon"] == pytest.approx(exact(z), rel=1e-9)


@pytest.mark.thorough
def test_the_schedules_of_a_sweep_share_a_program_and_their_report_knows_every_round(tmp_path):
    table = {"noise_schedule": (None, "power:1", "geometric:0.9"), "noise_multiplier": (0.0, 4.0)}
    plan = expand_sweep(SMALL, [table])
    assert plan.families() == [[(0, 1)], [(2, 3, 4, 5)]]
    base = "\n".join(f"{name} = {json.dumps(value)}" for name, value in SMALL.items())
    sweep = 'noise-schedule = ["constant", "power:1", "geometric:0.9"]\nnoise-multiplier = [0, 4]'
    (tmp_path / "a.toml").write_text(f"{base}\neval-every = 6\n[sweep]\n{sweep}")
    command = ["sweep", str(tmp_path / "a.toml"), "--out", str(tmp_path / "out"), "--quiet"]
    assert main(command) == 0
    rows = pq.read_table(tmp_path / "out" / "results.parquet").to_pylist()
    found = {(r["noise_schedule"], r["noise_multiplier"], r["round"]): r["epsilon"] for r in rows}
    for text in ("constant", "power:1", "geometric:0.9"):
        assert found[text, 0.0, T] is None
        z = np.broadcast_to(Schedule.parse(text).noise(4.0, T), (T,))
        assert exact(z[:6]) <= found[text, 4.0, 6] <= 1.2 * exact(z[:6])
        assert found[text, 4.0, 12] == pytest.approx(exact(z), rel=1e-9)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    [epsilons] = {
        round(next(iter(plan["guarantee"]["zero_out"]["joint_dp"].values()))["epsilon"], 6)
        for plan in report["guarantees"]
        if plan["noise_multiplier"] > 0
    }
    assert epsilons == pytest.approx(exact([4.0] * T), abs=1e-5)


def test_a_plan_of_pure_releases_costs_their_sum_at_a_tiny_delta():
    found = prepare(config(mechanism="pure", noise_multiplier=8.0))
    [entry] = found.planned().entries
    assert tuple(entry) == (8.0, 1.0, T)
    assert tight_epsilon((found.planned(),), 1e-300) == pytest.approx(T / 8, rel=1e-6)


def test_tuning_on_other_clients_scales_the_noise_of_every_round():
    asked = config(
        clients=20, held_out_clients=0.25, noise_multiplier=2.0, noise_schedule="geometric:0.8",
        sampling_rate=0.5,
    )  # fmt: skip
    source = set_up(asked, clips=False)
    expected = np.asarray(Schedule.parse("geometric:0.8").noise(2.0, T)) * (5 / 15)
    np.testing.assert_allclose(source.hparams.noise_multiplier, expected, rtol=1e-6)
    source.simulation.check_rounds(source.hparams, 0, T, None)


@pytest.mark.thorough
def test_a_schedule_is_tuned_and_a_run_of_what_was_found_spends_the_whole_target(tmp_path):
    flags = ["--epsilon", "2", "--noise-schedule", "power:1"]
    flags += ["--clip", "0.5", "--held-out-clients", "0.5"]
    steps = ["--steps", "1", "--seeds", "2", "--wrt", "learning-rate", "--out", str(tmp_path / "t")]
    assert main(["tune", *FLAGS, *flags, *steps]) == 0
    tuned, out = tmp_path / "t" / "tuned.toml", tmp_path / "run"
    assert main(["run", str(tuned), "--quiet", "--out", str(out)]) == 0
    run = RunDirectory(out)
    resolved = run.config()["resolved"]
    assert resolved["noise_first"] == pytest.approx(T * resolved["noise_last"], rel=1e-6)
    z = np.asarray(POWER.noise(run.summary()["noise_multiplier"], T))
    assert z[0] == pytest.approx(resolved["noise_first"], rel=1e-6)
    assert run.summary()["epsilon"] == pytest.approx(exact(z), rel=1e-6)
    assert 2 * 0.999 <= run.summary()["epsilon"] <= 2
