"""A user's own metric through every command: its record decides, and its name means nothing."""

import json
import shlex
import sys

import pytest

from fedjaxsim.cli import main
from fedjaxsim.data.files import read_tables
from fedjaxsim.report import figures
from fedjaxsim.runs.parts import part_of
from fedjaxsim.runs.sweep_results import read_runs

CODE = '''
import jax.numpy as jnp
from fedjaxsim.tasks import Metric, StreamingMetric, softmax


def loss(model, outputs, *, larger: bool = True):
    """Softmax with metrics of my own.

    Args:
      larger: whether a larger reduction is better.
    """
    task = softmax(model, outputs)

    def add(count, params, batch):
        return count + batch.sum(task.metrics(params, batch)["accuracy"])

    hits = StreamingMetric(lambda most_rows: jnp.zeros(()), add, lambda count: count)
    return task._replace(
        streaming_metrics={"loss_reduction": hits},
        records={"loss_reduction": Metric("reduction", "rows", larger)},
    )


def round(task):
    """The negative loss, under the name of a column."""
    negative = lambda params, batch: -task.metrics(params, batch)["loss"]
    return negative, Metric("certainty", larger_is_better=True)


def plain(task):
    return lambda params, batch: task.metrics(params, batch)["accuracy"], Metric("plain")
'''
BASE = """
data = "digits"
clients = 10
algorithm = "fedavg"
loss = "metrics_of_mine:loss"
outputs = 10
metrics = ["metrics_of_mine:round", "metrics_of_mine:plain"]
local-steps = 2
rounds = 2
eval-every = 2
sampling-rate = 1.0
validation-fraction = 0.2
trust-own-code = true
"""
RATES = "learning-rate = [0.3, 0.001]\n"


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """A folder with the module, in which commands run."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "metrics_of_mine.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield folder
    sys.modules.pop("metrics_of_mine", None)


def run(command):
    return main(shlex.split(command))


@pytest.fixture(scope="module")
def finished(mine):
    """A sweep over two learning rates that the metric ranks."""
    (mine / "up.toml").write_text(f'{BASE}metric = "loss_reduction"\n[sweep]\n{RATES}')
    assert run("sweep up.toml --out up --quiet") == 0
    return mine / "up"


def test_a_sweep_ranks_by_the_record_and_its_results_keep_it(finished, capsys):
    runs, keys, report = read_runs(finished)
    assert keys == ["learning_rate"]
    assert report["summary"]["metric"] == "test_loss_reduction"
    record = runs[0].metrics["loss_reduction"]
    assert (record.title, record.unit, record.larger_is_better) == ("reduction", "rows", True)
    values = {each.settings["learning_rate"]: each.value("test_loss_reduction") for each in runs}
    least, most = sorted(values, key=lambda rate: values[rate] or 0.0)
    assert (least, most) == (0.001, 0.3)  # training helps
    assert run("sweep up.toml --out up --quiet") == 0  # it is finished: the report again
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("test reduction (rows) at the end, best over learning rate")
    [line] = [line for line in lines if line.strip().startswith("0.3")]
    assert float(line.split()[1]) == pytest.approx(values[0.3], abs=1e-3)


def test_a_sweep_does_not_go_on_with_other_code(finished, mine, capsys):
    """Runs of two codes would stand in one table."""
    file = mine / "metrics_of_mine.py"
    file.write_text(f"{CODE}# other code")
    try:
        assert run("sweep up.toml --out up --quiet") == 2
    finally:
        file.write_text(CODE)
    assert "already holds a sweep of other code of yours" in capsys.readouterr().err


def test_a_comparison_imports_no_code_of_the_user(finished, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "metrics_of_mine", None)  # it cannot be imported
    part_of.cache_clear()
    assert run(f"compare {finished} --all-runs") == 0
    assert "reduction" in capsys.readouterr().out


@pytest.mark.thorough
def test_the_opposite_record_ranks_the_other_way(mine, capsys):
    swept = f'{BASE}metric = "loss_reduction"\nlarger = false\n[sweep]\n{RATES}'
    (mine / "down.toml").write_text(swept)
    assert run("sweep down.toml --out down --quiet") == 0
    assert any(line.strip().startswith("0.001") for line in capsys.readouterr().out.splitlines())


@pytest.mark.thorough
def test_a_search_chooses_by_it(mine, capsys):
    text = f'{BASE}metric = "loss_reduction"\n[search]\nseeds = [9]\n{RATES}[sweep]\nseed = [0]\n'
    (mine / "search.toml").write_text(text)
    assert run("sweep search.toml --out search --quiet") == 0
    out = capsys.readouterr().out
    assert "by the mean validation reduction (rows)" in out
    [chosen], _, _ = read_runs(mine / "search")
    assert chosen.settings["learning_rate"] == 0.3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f'metric = "plain"\n[sweep]\n{RATES}', "'plain' must state whether larger is better"),
        (f'metric = "hits"\n[sweep]\n{RATES}', "metric must be"),
        (f'metric = "loss_reduction"\n[sweep]\nlarger = [true, false]\n{RATES}', "contradict"),
    ],
)
def test_a_contradiction_is_refused_before_anything_is_computed(mine, capsys, text, words):
    (mine / "bad.toml").write_text(BASE + text)
    assert run("sweep bad.toml --out bad --quiet") == 2
    assert words in capsys.readouterr().err
    assert not (mine / "bad").exists()


def test_runs_progress_tables_and_pictures_have_it(mine, capsys, monkeypatch):
    drawn = []
    draw = figures.run_figure
    monkeypatch.setattr(figures, "run_figure", lambda *a: drawn.append(draw(*a)) or drawn[-1])
    (mine / "one.toml").write_text(BASE)
    assert run("run one.toml --out one") == 0
    out, progress = capsys.readouterr()
    assert any("0/2" in line and "reduction" in line for line in progress.splitlines())
    summary = json.loads((mine / "one" / "summary.json").read_text())
    above = next(k for k, line in enumerate(out.splitlines()) if line.startswith("run "))
    heading = out.splitlines()[above - 1]
    for title in ("accuracy", "reduction", "certainty", "plain"):
        assert title in heading
    assert f"{summary['test_loss_reduction']:.3f}" in out
    record = read_tables(mine / "one" / "config.toml")["resolved"]["metrics"]["loss_reduction"]
    assert record == {"title": "reduction", "unit": "rows", "larger_is_better": True}
    assert [axes.get_ylabel() for axes in drawn[0].axes][1].startswith("test accuracy")
    assert run("run one.toml --data synthetic --as-classes --out two") == 2
    assert "as-classes needs one whole number as the target" in capsys.readouterr().err
    assert run("compare one") == 0
    assert "reduction" in capsys.readouterr().out


@pytest.mark.thorough
def test_tuning_maximizes_it(mine, capsys):
    (mine / "tune.toml").write_text(BASE + "learning-rate = 0.01\n")
    flags = "--wrt learning-rate --metric round --seeds 2 --steps 2 --out tuned --quiet"
    assert run(f"tune tune.toml {flags}") == 0
    path = json.loads((mine / "tuned" / "path.json").read_text())
    first, best = path["steps"][0], path["steps"][path["best"]]
    assert best["value"] > first["value"]
    assert best["point"]["learning_rate"] > 0.01
    assert path["test"]["gain"] > 0
    assert "certainty rose by" in capsys.readouterr().out
    assert run("ls tuned") == 0
    assert f"certainty {best['value']:.3f}" in capsys.readouterr().out
