"""`fedjaxsim run --from` and `fedjaxsim resume`, from flags to files."""

import re
import shutil
from pathlib import Path

import pytest

from fedjaxsim.cli import main, running
from fedjaxsim.cli.program import parse
from fedjaxsim.privacy.assumptions import JOINED, NEW_CLIENTS, NO_RELEASE
from fedjaxsim.privacy.entries import Entry
from fedjaxsim.privacy.events import PrivacySpend
from fedjaxsim.privacy.guarantee import tight_epsilon
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.finished import load_run
from fedjaxsim.runs.settings_files import read_toml

DATA = ["--data", "synthetic", "--loss", "squared", "--clients", "6", "--seed", "3"]
FIRST = [
    *DATA, "--algorithm", "fedavg", "--rounds", "2", "--eval-every", "1", "--local-steps", "1",
    "--learning-rate", "0.01", "--sampling-rate", "1", "--noise-multiplier", "2", "--quiet",
]  # fmt: skip
NEXT = ["--algorithm", "pmtl", "--lam", "0.3", "--rounds", "3", "--noise-multiplier", "3"]


@pytest.fixture(scope="module")
def stages(tmp_path_factory) -> Path:
    """FedAvg, and PMTL that goes on from there."""
    folder = tmp_path_factory.mktemp("stages")
    assert main(["run", *FIRST, "--out", f"{folder}/first"]) == 0
    command = ["run", "--from", f"{folder}/first", *NEXT, "--quiet", "--out", f"{folder}/second"]
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
        assert main(command) == 0
    (folder / "printed").write_text("\n".join(lines))
    return folder


@pytest.mark.thorough
def test_what_neither_flag_nor_file_says_is_that_of_the_run_before(stages, tmp_path):
    file = tmp_path / "next.toml"
    file.write_text("mu = 0.5\nepsilon = 2.0\nalgorithm = 'fedprox'")
    flags = ["--learning-rate", "0.02"]
    command = parse(["run", str(file), "--from", f"{stages}/first", *flags])
    before = read_toml(stages / "first" / "config.toml")
    assert (before.clients, before.seed, before.sampling_rate) == (6, 3, 1.0)
    settings = command.settings
    assert (settings.clients, settings.seed, settings.sampling_rate) == (6, 3, 1.0)
    assert (settings.mu, settings.algorithm, settings.learning_rate) == (0.5, "fedprox", 0.02)
    # The file's ε takes the place of the other run's noise.
    assert (settings.epsilon, settings.noise_multiplier) == (2.0, None)
    other = parse(["run", str(file), "--from", f"{stages}/first", "--seed", "9"]).settings
    assert (other.seed, other.data_seed, settings.partition_seed) == (9, 3, None)


def test_the_charges_of_both_stages_are_composed(stages):
    first, second = (RunDirectory(stages / name) for name in ("first", "second"))
    simulation = prepare(read_toml(first.path / "config.toml")).simulation
    delta = first.summary()["delta"]

    def epsilon(*entries: Entry) -> float:
        scheme, event = simulation.sampler.scheme, simulation.mechanism.event
        return tight_epsilon([PrivacySpend(scheme, event, entries)], delta)

    both = epsilon(Entry(2.0, 1.0, 2), Entry(3.0, 1.0, 3))
    assert first.summary()["epsilon"] == epsilon(Entry(2.0, 1.0, 2))
    assert second.summary()["epsilon"] == pytest.approx(both, rel=1e-12)
    [found] = second.guarantee()["zero_out"]["joint_dp"].values()
    assert found["epsilon"] == second.summary()["epsilon"]
    words = "fedavg (2 rounds), then pmtl (3 rounds)"
    assert f"The charges of all stages are composed: {words}." in found["assumptions"]
    assert f"stages: {words}; the guarantee covers all of them" in (stages / "printed").read_text()


def test_a_stage_starts_with_what_was_spent_and_learnt(stages):
    first, second = (RunDirectory(stages / name) for name in ("first", "second"))
    records = second.metrics()
    assert [record["round"] for record in records] == [0, 1, 2, 3]
    last = first.metrics()[-1]
    # Records hold a bound by RDP until the last round, which has the tight value.
    assert records[0]["epsilon"] >= last["epsilon"] == first.summary()["epsilon"]
    assert records[-1]["epsilon"] == second.summary()["epsilon"]
    # Clients of PMTL start from the model that FedAvg predicted with.
    assert records[0]["test_nmse"] == pytest.approx(last["test_nmse"], rel=1e-6)
    [stage] = second.config()["stages"]
    assert (stage["directory"], stage["algorithm"], stage["rounds"]) == (
        f"{stages}/first", "fedavg", 2,
    )  # fmt: skip


def test_a_stage_that_will_spend_too_much_says_so_before_its_first_round(
    stages, tmp_path, capsys, monkeypatch
):
    def unasked(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "execute", unasked)
    command = f"run --from {stages}/first --epsilon 0.5 --rounds 1 --out {tmp_path}/next"
    with pytest.raises(KeyboardInterrupt):
        parse(command.split()).prepare()()
    first = RunDirectory(stages / "first")
    assert first.summary()["epsilon"] > 0.5
    found = re.search(r"will spend ε ([\d.]+), more than the 0.5 asked", capsys.readouterr().err)
    assert found is not None
    assert float(found[1]) > first.summary()["epsilon"]


TUNED = [
    "--algorithm", "finetune", "--penalty", "mean", "--lam", "0.2", "--rounds", "3",
    "--eval-every", "1",
]  # fmt: skip


@pytest.mark.thorough
def test_fine_tuning_starts_where_the_run_ended_and_costs_nothing(stages, tmp_path, capsys):
    out = tmp_path / "tuned"
    command = ["run", "--from", f"{stages}/second", *TUNED, "--quiet", "--out", str(out)]
    assert main([*command, "--learning-rate", "0.001"]) == 0
    before, after = RunDirectory(stages / "second"), RunDirectory(out)
    last, records = before.metrics()[-1], after.metrics()
    assert [record["round"] for record in records] == [0, 1, 2, 3]
    assert records[0]["test_nmse"] == pytest.approx(last["test_nmse"], rel=1e-6)
    assert records[-1]["train_loss"] < records[1]["train_loss"]
    bounds = {record["epsilon"] for record in records[:-1]}
    assert len(bounds) == 1  # nothing is spent
    assert bounds.pop() >= records[-1]["epsilon"] == last["epsilon"]
    for name in ("epsilon", "epsilon_replace", "delta"):
        assert after.summary()[name] == before.summary()[name]
    [found] = after.guarantee()["zero_out"]["joint_dp"].values()
    words = "fedavg (2 rounds), then pmtl (3 rounds), then finetune (3 rounds)"
    assert f"The charges of all stages are composed: {words}." in found["assumptions"]
    assert NO_RELEASE in found["assumptions"]
    printed = capsys.readouterr().out
    assert NO_RELEASE in printed
    assert "finetune mean" in printed
    # In Python: from the states of the run, all clients, the settings that fine-tuning reads.
    earlier, tuned = (prepare(read_toml(each.path / "config.toml")) for each in (before, after))
    assert tuned.simulation.sampler.scheme.kind == "full"
    state = before.checkpoints().last().state(earlier.init())
    begun = tuned.simulation.start_from(state, tuned.hparams, earlier.simulation, earlier.hparams)
    ended, _ = tuned.simulation.run(begun, tuned.hparams, 3, eval_every=1)
    found = tuned.simulation.evaluate(ended, tuned.hparams).summary()
    assert records[-1]["test_nmse"] == pytest.approx(found["test_nmse"], rel=1e-6)


def test_a_stage_without_a_release_takes_all_clients_and_a_constant_rate(stages, tmp_path):
    sampled = "sampling = 'fixed'\ncohort = 3\nschedule = 'cosine'\nclients = 6\nbatch-size = 4\n"
    (tmp_path / "config.toml").write_text(sampled)
    tuned, again = (parse(["run", "--from", str(tmp_path), *flags]) for flags in (TUNED, []))
    assert again.settings.sampler == "fixed"
    settings = tuned.settings
    assert (settings.sampler, settings.get("schedule")) == ("full", "constant")
    assert settings.batch_size == 4


@pytest.mark.thorough
def test_held_out_clients_start_from_what_was_published_and_cost_nothing(tmp_path, capsys, refused):
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["run", *FIRST, "--held-out-clients", "0.33", "--out", str(first)]) == 0
    new = ["run", "--from", str(first), *TUNED, "--clients-used", "held-out", "--quiet", "--out"]
    assert "took part in the run before" in refused(
        " ".join([*new, str(second), "--partition-seed", "1"])
    )
    assert main([*new, str(second), "--train-rows", "2"]) == 0
    one, other = RunDirectory(first), RunDirectory(second)
    assert (one.summary()["clients"], other.summary()["clients"]) == (4, 2)
    assert load_run(second).sim.population.bound("train") == 2
    for name in ("epsilon", "epsilon_replace", "delta"):
        assert other.summary()[name] == one.summary()[name]
    [found] = other.guarantee()["zero_out"]["joint_dp"].values()
    assert NEW_CLIENTS.format(2) in found["assumptions"]
    assert "finetune mean of held-out clients" in capsys.readouterr().out
    third = tmp_path / "third"
    joining = ["run", "--from", str(first), "--clients-used", "all", "--quiet", "--out", str(third)]
    assert main(joining) == 0
    assert RunDirectory(third).summary()["clients"] == 6
    assert JOINED.format(2, 6) in RunDirectory(third).guarantee()["assumed"]
    assert "ran on other data" in refused(" ".join([*joining[:-1], "x", "--partition-seed", "1"]))


@pytest.mark.thorough
def test_a_stage_goes_on_as_any_run_does(stages, refused, tmp_path, capsys):
    third = tmp_path / "third"
    shutil.copytree(stages / "second", third)
    assert main(["resume", str(third), "--rounds", "4", "--quiet"]) == 0
    directory = RunDirectory(third)
    assert directory.metrics()[:4] == RunDirectory(stages / "second").metrics()
    assert directory.summary()["epsilon"] > RunDirectory(stages / "second").summary()["epsilon"]
    assert "fedavg (2 rounds), then pmtl (4 rounds)" in capsys.readouterr().out
    shutil.rmtree(third / "checkpoints")
    assert "--overwrite" in refused("resume third")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("run --from {}/first --partition-seed 4", "partition-seed"),
        ("run --from {}/first --clients 7", "leave out these settings"),
        ("run --from {}/first --out {}/first", "out"),
        ("run --from {}/absent", "absent"),
        ("run --algorithm finetune", "--from"),
        ("run --from {}/first --algorithm finetune --epsilon 2", "epsilon"),
        ("run --from {}/first --algorithm finetune --lam -1", "lam"),
        ("run --from {}/first --algorithm finetune --penalty vanilla --lam 2", "lam"),
        ("run --from {}/first --algorithm finetune --model mlp", "['Dense_0']['kernel']"),
        ("run --from {}/first --algorithm finetune --clients-used held-out", "held-out-clients"),
        ("resume {}/absent", "absent"),
        ("resume {}", "{} holds several runs: give one of them, as {}/"),
        ("resume {}/first", "--rounds"),
        ("resume {}/first --rounds 1", "rounds"),
        ("resume {}/first --rounds 1e10", "at most 2147483647"),
        ("resume {}/first --checkpoint-every soon", "checkpoint-every"),
    ],
)
def test_bad_input_is_refused_in_one_line(stages, refused, arguments, words):
    before = sorted(stages.rglob("*"))
    assert words.replace("{}", str(stages)) in refused(arguments.replace("{}", str(stages)))
    assert sorted(stages.rglob("*")) == before
