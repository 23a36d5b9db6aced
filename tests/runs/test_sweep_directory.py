import contextlib
import math
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.problems import least_squares

from fedjaxsim import store
from fedjaxsim.algorithms import SYSTEMS
from fedjaxsim.cli.messages import in_flags
from fedjaxsim.privacy.entries import Entry, SamplingScheme
from fedjaxsim.privacy.events import Gaussian, PrivacySpend
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.runs import selecting, sweeping
from fedjaxsim.runs.build import versions
from fedjaxsim.runs.directory import OTHER_DATA, other_results
from fedjaxsim.runs.selecting import prepare_selection
from fedjaxsim.runs.sweep_results import SweepDirectory, advise_on_noise, recorded_settings, tidy
from fedjaxsim.runs.sweep_runs import SweepOptions, expand_sweep, read_sweep
from fedjaxsim.runs.sweeping import prepare_sweep
from fedjaxsim.simulation import Simulation

TABLES = [
    {"algorithm": ("pmtl",), "lam": (0.1, 0.3), "epsilon": (1.0, math.inf)},
    {"algorithm": ("local",), "local_steps": (2,)},
]
PLAN = expand_sweep({"rounds": 10}, TABLES)


def rows_of(run: int, accuracy: float = 0.5) -> list[dict]:
    return [
        {
            "run": run, "round": round_, "train_loss": 1.0 / round_ if round_ else None,
            "test_accuracy": accuracy, "epsilon": 0.1 * round_, "epsilon_replace": 0.2 * round_,
            "delta": 1e-3,
        }
        for round_ in (0, 5, 10)
    ]  # fmt: skip


def directory(path, plan=PLAN, *, overwrite: bool = False) -> SweepDirectory:
    return SweepDirectory.open(path, plan, overwrite=overwrite)


def test_rows_become_typed_columns_where_null_is_absent_and_nan_stays():
    rows = [
        {"run": 4, "round": 0, "train_loss": None, "test_loss": math.nan, "epsilon": 0.0,
         "epsilon_replace": 0.0, "delta": 0.01},
        {"run": np.int64(1), "round": np.int32(5), "train_loss": np.float32(0.5),
         "test_accuracy": 0.25, "epsilon": math.inf, "epsilon_replace": None, "delta": 0.01,
         "epsilon_tight": False},
    ]  # fmt: skip
    table = tidy(PLAN, rows)
    expected = {
        "run": pa.int32(), "algorithm": pa.string(), "lam": pa.float64(),
        "target_epsilon": pa.float64(), "local_steps": pa.int64(), "round": pa.int32(),
        "train_loss": pa.float64(), "test_accuracy": pa.float64(), "test_loss": pa.float64(),
        "epsilon": pa.float64(), "epsilon_replace": pa.float64(), "delta": pa.float64(),
        "epsilon_tight": pa.bool_(), "failed": pa.bool_(),
    }  # fmt: skip
    assert {field.name: field.type for field in table.schema} == expected
    assert table.column_names[:7] == list(expected)[:7]
    assert table.column_names[-4:] == list(expected)[-4:]
    first, second = table.to_pylist()
    assert first == {
        "run": 1, "algorithm": "pmtl", "lam": 0.1, "target_epsilon": math.inf,
        "local_steps": None, "round": 5, "train_loss": 0.5, "test_accuracy": 0.25,
        "test_loss": None, "epsilon": None, "epsilon_replace": None, "delta": 0.01,
        "epsilon_tight": False, "failed": False,
    }  # fmt: skip
    assert (second["run"], second["lam"], second["local_steps"]) == (4, None, 2)
    assert math.isnan(second["test_loss"])
    assert not second["failed"]


def test_epsilons_of_examples_are_columns_where_some_run_protects_them():
    spent = {"example_epsilon": 0.5, "example_epsilon_replace": math.inf, "example_delta": 0.01}
    table = tidy(PLAN, [*rows_of(0), rows_of(1)[-1] | spent])
    assert table.column_names[-4:] == [*spent, "failed"]
    *others, last = table.to_pylist()
    assert {each[name] for each in others for name in spent} == {None}
    assert [last[name] for name in spent] == [0.5, None, 0.01]
    # What a sweep asks for is another column.
    plan = expand_sweep({}, [{"example_epsilon": (1.0, 2.0)}])
    assert tidy(plan, [rows_of(0)[-1] | spent]).column_names[1] == "target_example_epsilon"


def test_a_swept_delta_is_the_column_that_all_rows_have():
    plan = expand_sweep({}, [{"delta": (0.1, 0.2)}])
    table = tidy(plan, [{"run": 1, "round": 0, "train_loss": 1.0, "delta": 0.2}])
    assert table.column_names.count("delta") == 1
    assert table["delta"].to_pylist() == [0.2]


def flags(losses, accuracies) -> list[bool]:
    rows = [
        {"run": 0, "round": t, "train_loss": loss, "test_accuracy": accuracy, "delta": 0.1}
        for t, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True))
    ]
    return tidy(PLAN, rows)["failed"].to_pylist()


def test_a_run_that_failed_is_recorded_from_there_on():
    fine = [0.5] * 4
    assert flags([None, 1.0, math.inf, 1.0], fine) == [False, False, True, True]
    assert flags([None, 1.0, 1.0, 1.0], [0.5, math.nan, 0.5, 0.5]) == [False, True, True, True]
    # Without test rows there is no metric, in any round.
    assert flags([None, 1.0, 1.0, 1.0], [math.nan] * 4) == [False] * 4


def add(sweep: SweepDirectory, *rows) -> None:
    sweep.add(rows, {})


def test_results_are_sorted_by_run_and_round(tmp_path):
    sweep = directory(tmp_path / "a" / "sweep")
    assert sweep.results().num_rows == 0
    added = sweep.add([*rows_of(3), *rows_of(1)], {})
    assert [(run.name, run.rows) for run in added] == [(run.name, run.rows) for run in sweep.runs()]
    add(sweep, *({**row, "test_nmse": 2.0} for row in rows_of(0)))
    assert sweep.finished() == {0, 1, 3}
    table = sweep.results()
    assert table.equals(pq.read_table(sweep.path / "results.parquet"))
    assert table["run"].to_pylist() == [0] * 3 + [1] * 3 + [3] * 3
    assert table["round"].to_pylist() == [0, 5, 10] * 3
    assert table["test_nmse"].to_pylist() == [2.0] * 3 + [None] * 6
    assert table.column_names[-5:] == [
        "epsilon", "epsilon_replace", "delta", "epsilon_tight", "failed",
    ]  # fmt: skip


def test_an_interrupted_sweep_goes_on(tmp_path):
    add(directory(tmp_path), *rows_of(2))
    # A file that a killed process leaves.
    store.unlock_folders()
    (tmp_path / f".results.parquet.{'a' * 32}").write_bytes(b"PAR1 half")
    again = directory(tmp_path, expand_sweep({"rounds": 10}, TABLES, SweepOptions(memory=1.0)))
    assert again.finished() == {2}
    assert again.checkpoint() is None
    names = sorted(path.name for path in tmp_path.iterdir() if path.name != store.LOCK)
    assert names == ["ledgers.json", "results.parquet", "sweep.toml"]
    add(again, *rows_of(0))
    assert again.results()["run"].to_pylist() == [0] * 3 + [2] * 3


def test_another_sweep_is_refused(tmp_path):
    add(directory(tmp_path), *rows_of(2))
    (tmp_path / "trade_off.png").write_bytes(b"")
    other = expand_sweep({"rounds": 20}, TABLES)
    with pytest.raises(ValueError, match=r"sweep with other settings .*--overwrite"):
        directory(tmp_path, other)
    with jax.enable_x64(True), pytest.raises(ValueError, match="made with JAX_ENABLE_X64=0, and"):
        directory(tmp_path)
    assert directory(tmp_path).finished() == {2}
    assert directory(tmp_path, other, overwrite=True).finished() == set()
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.toml", store.LOCK}


def test_a_sweep_of_another_version_is_called_that(tmp_path):
    directory(tmp_path)
    file = tmp_path / "sweep.toml"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(line for line in lines if not line.startswith("digest")))
    with pytest.raises(ValueError, match=r"written by another version .* command again"):
        recorded_settings(tmp_path)
    directory(tmp_path)  # as the same command does
    assert len(recorded_settings(tmp_path)[1]) == len(PLAN.runs)


def test_the_description_asks_for_the_same_sweep(tmp_path):
    directory(tmp_path)
    assert read_sweep(tmp_path / "sweep.toml") == PLAN
    content = tomllib.loads((tmp_path / "sweep.toml").read_text())
    assert content["versions"] == versions()
    resolved = content["resolved"]
    common, of_runs = resolved.pop("settings"), resolved.pop("settings_of_runs")
    assert [common | of_run for of_run in of_runs] == [run.settings() for run in PLAN.runs]
    assert common["rounds"] == 10
    assert resolved.pop("digest")
    assert resolved == {
        "fingerprint": PLAN.fingerprint, "runs": 5, "best_over": [],
        "data_fingerprint": "", "code_fingerprint": "", "x64": False,
    }  # fmt: skip


def test_a_path_that_is_a_file_or_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file"):
        directory(tmp_path / "file")
    with pytest.raises(ValueError, match="inside"):
        directory(tmp_path / "file" / "inside")


def keep(sweep: SweepDirectory, round_: int = 5) -> None:
    """A checkpoint of runs 1 and 0."""
    rows = [*rows_of(1)[:2], *rows_of(0)[:2]]
    rows[1]["test_loss"] = math.nan
    note = {"rows": rows, "runs": (1, 0), "places": 2}
    sweep.checkpoints.save(round_, {"w": jnp.arange(3)}, note)


def test_rows_that_were_kept_and_rows_that_follow_make_one_table(tmp_path):
    sweep = directory(tmp_path)
    assert sweep.checkpoint() is None
    keep(sweep)
    loaded = directory(tmp_path).checkpoint()
    assert loaded is not None
    assert (loaded.note["runs"], loaded.note["places"], loaded.round) == ([1, 0], 2, 5)
    kept = [*rows_of(1)[:2], *rows_of(0)[:2]]
    kept[1]["test_loss"] = math.nan
    rest = [*rows_of(1)[2:], *rows_of(0)[2:]]
    whole = tidy(PLAN, [*kept, *rest])
    assert str(tidy(PLAN, [*loaded.note["rows"], *rest]).to_pylist()) == str(whole.to_pylist())


def test_results_take_the_place_of_their_checkpoint(tmp_path):
    sweep = directory(tmp_path)
    keep(sweep)
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "kept")
    add(sweep, *rows_of(0), *rows_of(1))
    assert not (tmp_path / "checkpoint").exists()
    # As after an interruption between the two steps.
    shutil.copytree(tmp_path / "kept", tmp_path / "checkpoint")
    assert sweep.checkpoint() is None
    assert not (tmp_path / "checkpoint").exists()


def test_damaged_files_are_named(tmp_path):
    sweep = directory(tmp_path)
    add(sweep, *rows_of(2))
    results = tmp_path / "results.parquet"
    good = results.read_bytes()
    # Any bit inside the runs.
    column = pq.read_metadata(results).row_group(0).column(0)
    start = column.dictionary_page_offset
    for bad in (b"", good[:100], good[:-1]):
        results.write_bytes(bad)
        with pytest.raises(ValueError, match=r"results\.parquet"):
            sweep.finished()
    for at in range(start, start + column.total_compressed_size):
        results.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        # A bit that nothing depends on, in a page's statistics say, may be another.
        with contextlib.suppress(ValueError):
            assert sweep.finished() == {2}
    results.write_bytes(good)
    assert sweep.finished() == {2}
    ledgers = tmp_path / "ledgers.json"
    spend = PrivacySpend(SamplingScheme("full", 3, 3), Gaussian(), (Entry(4.0, 1.0, 10),))
    sweep.add([], {2: [spend]})
    assert sweep.ledgers() == {2: (spend,)}
    good = ledgers.read_text()
    for bad in (good.replace("4.0", "8.0"), good.replace("10", "[]"), '{"runs": {}}', "[]", "3"):
        ledgers.write_text(bad)
        with pytest.raises(ValueError, match=r"ledgers\.json is damaged"):
            sweep.ledgers()
    (tmp_path / "sweep.toml").write_text("rounds = 10")
    with pytest.raises(ValueError, match=r"sweep\.toml"):
        directory(tmp_path)


def test_a_checkpoint_of_another_sweep_is_refused(tmp_path):
    other = directory(tmp_path / "other", expand_sweep({"rounds": 11}, TABLES))
    keep(other)
    sweep = directory(tmp_path / "this")
    shutil.copytree(other.path / "checkpoint", sweep.path / "checkpoint")
    with pytest.raises(ValueError, match="other settings"):
        sweep.checkpoint()


def test_a_table_has_a_sentence_for_each_algorithm_whose_other_message_forgets_noise():
    population, task = least_squares([5, 9, 17])
    experiments: dict[int, Any] = {}
    for run, (name, z) in enumerate([("scaffold", 1.0), ("scaffold", 2.0), ("fedavg", 1.0)]):
        sim = Simulation(SYSTEMS[name].make(task, 3), population, full_participation())
        hparams = sim.hyperparameters(clip=1.0, noise_multiplier=z)
        config = SimpleNamespace(algorithm=name, rounds=50)
        experiments[run] = SimpleNamespace(simulation=sim, hparams=hparams, config=config)
    runs: Any = [SimpleNamespace(name=str(run), rows=[{"failed": 0}]) for run in experiments]
    advice = advise_on_noise(runs, experiments)
    assert tuple(map(in_flags, advice)) == (
        "SCAFFOLD's server state adds up the noise of all 50 rounds; at the same ε, "
        "--message steps forgets it (2 runs).",
    )


def test_another_sweep_is_refused_before_its_runs_are_checked(tmp_path, monkeypatch):
    directory(tmp_path)
    other = expand_sweep({"seed": 1}, [{**TABLES[0], "lam": (0.1,)}, *TABLES[1:]])
    monkeypatch.setattr(sweeping, "families_of", None)
    said = r"with other settings \(seed not given there and 1 here, lam 0.1,0.3 there and 0.1 "
    with pytest.raises(ValueError, match=said + r"here, rounds 10 there and not given here\)"):
        prepare_sweep(other, tmp_path)
    reversed_keys = [dict([*table.items()][::-1]) for table in TABLES]
    with pytest.raises(ValueError, match="of the same settings, but combined otherwise"):
        prepare_sweep(expand_sweep({"rounds": 10}, reversed_keys), tmp_path)


def test_other_results_are_told_by_what_differs():
    settings = dict.fromkeys("abcde", 1)
    for ours, told in (
        ({**settings, "e": None}, "b not given there and 1 here, c not given there and 1 here, "
         "and 1 other)"),
        (settings, "c not given there and 1 here, and 2 others)"),
        ({"seed": "secret:8589934592"}, "seed not given there and secret here)"),
        ({}, f"already holds a sweep {OTHER_DATA}"),
    ):  # fmt: skip
        error = other_results(Path("runs/a"), "sweep", {}, ours, OTHER_DATA)
        assert f"{told}: choose another directory" in str(error)


def test_a_sweep_does_not_go_on_with_other_data_or_code(tmp_path):
    """Its finished runs would stand beside runs of rows that they never saw."""
    for data in ("3fa1", "3fa1"):
        SweepDirectory.open(tmp_path, PLAN, data)
    with pytest.raises(ValueError, match="already holds a sweep of other code of yours: choose"):
        SweepDirectory.open(tmp_path, PLAN, "3fa1", code="0b2c")
    with pytest.raises(ValueError, match="already holds a sweep on other data: choose another"):
        SweepDirectory.open(tmp_path, PLAN, "77bc")
    SweepDirectory.open(tmp_path, PLAN, "77bc", overwrite=True)


def test_another_selection_is_refused_before_its_candidates_are_checked(tmp_path, monkeypatch):
    (tmp_path / "selection.json").touch()
    monkeypatch.setattr(selecting, "_candidates", None)
    with pytest.raises(ValueError, match=r"holds a selection \(selection.json\).*--overwrite"):
        prepare_selection(
            PLAN, tmp_path, "geometric:2", (3.0, 1.0), overwrite=False, say_how_far=print
        )
