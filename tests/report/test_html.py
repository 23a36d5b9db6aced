"""Reports as HTML: the numbers of their files, text that stays text, and nothing from elsewhere."""

import itertools
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from problems import HANGS

from fedjaxsim.cli import main
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.privacy.events import Drawn, Entry, PrivacyEvent, PrivacySpend, SamplingScheme
from fedjaxsim.privacy.guarantee import report
from fedjaxsim.report.envelopes import envelope
from fedjaxsim.report.files import lines, write_json
from fedjaxsim.report.plots import picture, png
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.sweep_directory import SweepDirectory
from fedjaxsim.runs.sweep_runs import resolve_sweep

NASTY = "<script>alert('x')</script> & \"co\""
PICTURE = png(picture("Curves", 2, 1))
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Contents of a page: tables by caption, headings, text, tags, and loaded addresses."""

    def __init__(self, source: str):
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.headings: list[tuple[int, str]] = []
        self.tags: set[str] = set()
        self.loads: list[str] = []
        self.alternatives: list[str] = []
        self.scopes: list[str | None] = []
        self.text = ""
        self._inside = ""
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self._inside = tag
        given = {key: value or "" for key, value in attrs}
        self.loads += [given[name] for name in ("src", "href", "srcset", "data") if name in given]
        if tag == "img":
            self.alternatives.append(given["alt"])
        elif tag == "table":
            self._rows: list[list[str]] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
            if tag == "th":
                self.scopes.append(given.get("scope"))
        elif re.fullmatch(r"h\d", tag):
            self.headings.append((int(tag[1]), ""))

    def handle_data(self, data):
        if self._inside == "style":
            return
        self.text += data
        if self._inside in ("td", "th"):
            self._rows[-1][-1] += data
        elif self._inside == "caption":
            self.tables[data] = self._rows
        elif re.fullmatch(r"h\d", self._inside):
            level, text = self.headings[-1]
            self.headings[-1] = level, text + data

    def handle_endtag(self, tag):
        self._inside = ""


def write_run(path, algorithm, values, *, seed=0, noise=2.0, names=tuple("abcde")):
    """A run of 5 clients, of which the last one has no test rows, as files."""
    directory = RunDirectory.create(path)
    count = np.array([3, 3, 3, 3, 0])
    evaluation = Evaluation("test", count, {"accuracy": np.array([*values, np.nan])})
    charged = PrivacySpend(
        SamplingScheme("full", 5, 5), PrivacyEvent("gaussian"), (Entry(noise, 1.0, 4),)
    )
    found = report([charged], 0.01, draws=(Drawn(f"d{seed}", 0, 4),))
    spent = found.find("zero_out").epsilon
    last = {"train_loss": 0.5, **evaluation.summary(), "epsilon": spent}
    resolved = {"data_fingerprint": f"f1d0{seed}"}
    config = {"algorithm": algorithm, "data": "csv:x.csv", "model": "linear", "seed": seed}
    directory.write_config(config | {"resolved": resolved, "versions": {"fedjaxsim": "0.1.0"}})
    records = [{"round": 0, **last, "epsilon": 0.0}, {"round": 4, **last}]
    (path / "metrics.jsonl").write_bytes(lines(records))
    directory.write_guarantee(found.to_json())
    columns = {"name": list(names), "train_rows": [7] * 5, "test_rows": count}
    directory.write_clients(columns | {"test_accuracy": evaluation.values["accuracy"]})
    (path / "curves.png").write_bytes(PICTURE)
    directory.write_summary({
        "algorithm": algorithm, "data": "csv:x.csv", "model": "linear", "rounds": 4,
        "rounds_planned": 4, "interrupted": False, **last, "epsilon_replace": None, "delta": 0.01,
        "rounds_per_second": 2.0, "compile_seconds": 0.5, "message_bytes": 2600,
        "server_bytes": 5200, "cohort": 5.0, "peak_bytes": 123_456_789,
    })  # fmt: skip
    return path


def read(path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "one"
    write_run(path, "fedavg", [0.1, 0.5, 0.6, 0.8])
    assert main(["report", str(path)]) == 0
    return path


def test_a_run_says_what_its_files_hold(run):
    page = read(run / "report.html")
    assert page.headings[0] == (1, "fedavg linear on csv:x.csv")
    assert [text for _, text in page.headings[1:]] == [
        "Results", "Privacy", "Curves", "Clients", "Communication, time and memory", "Settings",
        "Reproduction",
    ]  # fmt: skip
    _, results = page.tables["Test metrics after the last round"]
    assert results[:2] == ["one", "0.500"]
    # By hand: of 0.1, 0.5, 0.6 and 0.8 the mean is 0.5, the squared deviations add up to 0.26, and
    # a tenth of four clients is the worst of them.
    headings, clients = page.tables["Test metrics over clients, equally weighted"]
    assert dict(zip(headings, clients, strict=True)) == {
        "metric": "test accuracy (fraction)", "clients": "4", "mean": "0.5000",
        "standard deviation": f"{math.sqrt(0.26 / 4):.4f}", "worst tenth": "0.1000",
        "p10": "0.2200", "p50": "0.5500", "p90": "0.7400",
    }  # fmt: skip
    assert page.tables["Clients with the worst values"][1:3] == [
        ["a", "0.1000", "7", "3"],
        ["b", "0.5000", "7", "3"],
    ]
    # 2,600 bytes up and 5,200 down for each of 5 clients in 4 rounds, at 2 rounds/s.
    costs = {row[0]: row[1] for row in page.tables["Costs"]}
    assert costs["message up"] == "2.6 kB"
    assert (costs["total up"], costs["total down"]) == ("52 kB", "104 kB")
    assert (costs["compute time"], costs["compile time"]) == ("2 s", "0.5 s")
    assert costs["memory"] == "123.5 MB"
    assert page.tables["Data and seeds"][1] == ["one", "0", "f1d00"]
    assert "fedjaxsim run config.toml --out DIR" in page.text
    assert (run / "config.toml").read_text() in page.text


def test_the_guarantee_is_that_of_the_file_with_its_adjacencies_in_words(run):
    page = read(run / "report.html")
    stored = json.loads((run / "guarantee.json").read_text())["zero_out"]["joint_dp"]
    (accountant, fields), *_ = stored.items()
    rows = page.tables["Information released about one client"]
    row = next(row for row in rows if "become zero" in row[0] and "all other clients" in row[1])
    sign, shown = row[2].split()
    assert (sign, row[4]) == ("=", accountant)
    assert fields["epsilon"] <= float(shown) < fields["epsilon"] * 1.0001
    assert all(sentence in page.text for sentence in fields["assumptions"])


def test_what_promises_nothing_says_why(tmp_path):
    run = write_run(tmp_path / "none", "fedavg", [0.1, 0.5, 0.6, 0.8], noise=0.0)
    main(["report", str(run)])
    page = read(run / "report.html")
    assert "Information released about one client" not in page.tables
    assert "no guarantee: no noise was added" in page.text


def test_runs_side_by_side_are_compared_over_their_seeds(tmp_path):
    values = {("pmtl", 0): 0.5, ("pmtl", 1): 0.7, ("fedavg", 0): 0.4, ("fedavg", 1): 0.4}
    for (algorithm, seed), value in values.items():
        write_run(tmp_path / f"{algorithm}-{seed}", algorithm, [value, 0, 1, value], seed=seed)
    paths = [str(tmp_path / f"{algorithm}-{seed}") for algorithm, seed in values]
    out = tmp_path / "all.html"
    assert main(["report", *paths, "--out", str(out)]) == 0
    page = read(out)
    assert page.headings[0] == (1, "4 runs side by side")
    assert [row[0] for row in page.tables["Test metrics after the last round"][1:]] == [
        "pmtl-0", "pmtl-1", "fedavg-0", "fedavg-1",
    ]  # fmt: skip
    # Means over clients (2·value + 1)/4: 0.5 and 0.6 of pmtl, 0.45 twice of fedavg.
    title = "Means over seeds with 95 % intervals; differences are paired by seed"
    _, first, second = page.tables[title]
    assert (first[0], first[1], first[2][:5]) == ("pmtl", "2", "0.550")
    assert (second[0], second[2], second[3][:6]) == ("fedavg", "0.450 ± 0.000", "-0.100")
    differ = page.tables["Settings that differ"]
    assert differ == [
        ["setting", "pmtl", "fedavg"], ["algorithm", "pmtl", "fedavg"], ["seed", "0, 1", "0, 1"],
    ]  # fmt: skip
    assert [row[2] for row in page.tables["Data and seeds"][1:]] == ["f1d00", "f1d01"] * 2
    assert len(page.alternatives) == 2
    assert "published under its own: pmtl-0, fedavg-0; pmtl-1, fedavg-1." in out.read_text()


def test_a_sweep_says_what_its_files_hold(tmp_path):
    plan = resolve_sweep({"rounds": 4}, [{"lam": (0.1, 0.3), "seed": (0, 1)}])
    sweep = SweepDirectory.open(tmp_path / "sweep", plan, {"fedjaxsim": "0.1.0"}, "f1d0")
    # The seeds of λ = 0.1 have 0.4 and 0.6, those of λ = 0.3 0.6 and 0.8; the worst tenth 0.1 less.
    values = {
        run: 0.2 * one.seed + {0.1: 0.4, 0.3: 0.6}[one.lam] for run, one in enumerate(plan.runs)
    }
    rows = [
        {"run": run, "round": round_, "train_loss": None, "epsilon": 0.5 * round_,
         "epsilon_replace": None, "delta": 0.01, "test_accuracy": value,
         "test_accuracy_worst_tenth": value - 0.1}
        for run, value in values.items() for round_ in (0, 4)
    ]  # fmt: skip
    sweep.add(rows, seconds=2.0, compile_seconds=8.0)
    results = sweep.results()
    sweep.write_envelopes(envelope(results, plan.columns, ["lam"], "test_accuracy"))
    charged = PrivacySpend(
        SamplingScheme("full", 5, 5), PrivacyEvent("gaussian"), (Entry(2.0, 1.0, 4),)
    )
    plans = [{"runs": [0, 1, 2, 3], "noise_multiplier": 2.0,
              "guarantee": report([charged], 0.01).to_json()}]  # fmt: skip
    summary = {"runs": 4, "finished": 4, "diverged": 0, "metric": "test_accuracy", "rounds": 4,
               "best_over": ["lam"], "peak_bytes": 10**9, **sweep.times()}  # fmt: skip
    traffic = {
        "algorithm": "pmtl",
        "runs": [0, 1, 2, 3],
        "message_bytes": 1000,
        "server_bytes": 0,
        "cohort": 5.0,
    }
    sweep.write_report(summary, plans, [traffic])
    (sweep.path / "envelopes.png").write_bytes(PICTURE)
    assert main(["report", str(sweep.path)]) == 0
    page = read(sweep.path / "report.html")
    assert page.headings[0] == (1, "Sweep of 4 runs")
    best = page.tables["test accuracy (fraction) at the end, best over λ"]
    assert best[1] == ["0.3", "0.7", "2.000", "∞", "0.01"]
    spread = page.tables["test accuracy (fraction) over the clients of the best settings"]
    assert spread == [["λ", "value", "worst tenth"], ["0.3", "0.7000", "0.6000"]]
    assert page.tables["Communication of each run"][1] == [
        "pmtl (4 runs)",
        "1 kB",
        "0 B",
        "5",
        "20 kB",
        "0 B",
    ]
    assert page.tables["Time and memory of the sweep"][1] == ["2 s", "8 s", "1 GB"]
    assert page.tables["Data and seeds"][1] == ["sweep", "0, 1", "f1d0"]
    assert "ε = 2.3178 zero-out" in page.text
    (sweep.path / "report.json").write_text("{}")
    assert main(["report", str(sweep.path)]) == 2


def write_tuning(path, **changes):
    """A tuning of two seeds with a step that was kept, one taken back, and a grid of two points."""
    write_run(path / "run", "pmtl", [0.1, 0.5, 0.6, 0.8])
    steps = [
        {"runs": 4, "accepted": True, "values": [2.0, 1.0], "point": {"learning_rate": 0.1}},
        {"runs": 8, "accepted": True, "values": [1.5, 0.9], "point": {"learning_rate": 0.25}},
        {"runs": 12, "accepted": False, "values": [None, 1.0], "point": {"learning_rate": 4.0}},
    ]
    grid = {
        "points": [{"learning_rate": 0.01}, {"learning_rate": 1.0}],
        "values": [[3.0, 3.0], [1.75, 1.25]], "best": 1, "runs": 4,
    }  # fmt: skip
    write_json(path / "path.json", {
        "statement": f"Tuned on {NASTY}: NOT covered.", "tuned_on": "validation",
        "shared_seed": "Runs share their seeds.",
        "metric": "loss", "split": "validation", "seeds": 2, "rounds": 4, "rule": "adam",
        "clients": {"tuning": 5, "run": 5}, "noise_multiplier": {"tuning": 1.5, "run": 2.0},
        "asked": {"wrt": ["learning-rate"], "seeds": 2, "steps": 2, "rule": "adam",
                  "metric": None, "public_data": "csv:a file.csv", "compare_grid": 2},
        "stopped": "the steps are used up", "best": 1,
        "gain": {"value": 0.3, "standard_error": 0.2}, "grid": grid, "steps": steps, **changes,
    })  # fmt: skip
    (path / "path.png").write_bytes(PICTURE)
    (path / "tuned.toml").write_text("# what was found\nlearning_rate = 0.25\n")
    return path


def test_a_tuning_says_what_its_files_hold(tmp_path):
    path = write_tuning(tmp_path / "tuned")
    assert main(["report", str(path)]) == 0
    page = read(path / "report.html")
    assert page.headings[0] == (1, "Tuning of pmtl linear on csv:x.csv")
    assert [name for _, name in page.headings[1:4]] == ["Results", "Privacy", "Points tried"]
    assert f"Tuned on {NASTY}: NOT covered." in page.text
    # By hand: of 2 and 1 the mean is 1.5, and its standard error is √(0.5 / 2) = 0.5.
    headings, start, tuned, grid = page.tables[
        "Means over 2 seeds, on validation rows of the run's own clients"
    ]
    assert headings == ["", "η", "validation loss", "run-equivalents spent"]
    assert start == ["start", "0.1", "1.5 ± 0.5", "4"]
    assert tuned == ["tuned", "0.25", "1.2 ± 0.3", "12"]
    assert grid == ["best on the grid", "1", "1.5 ± 0.25", "4"]
    assert page.tables["Steps of the descent; step 0 is the start, step 1 the best"][2:] == [
        ["1", "0.25", "1.2 ± 0.3", "8", "kept"],
        ["2", "4", "not finite", "12", "taken back"],
    ]
    assert page.tables["Grid"][1] == ["0", "0.01", "3 ± 0"]
    assert "The loss fell by 0.3 ± 0.2 from the start" in page.text
    # The guarantee and the spread over clients are the final run's.
    assert page.tables["Test metrics after the last round"][1][:2] == ["final run", "0.500"]
    assert "ε = 2.3178 zero-out" in page.text
    assert len(page.alternatives) == 3
    assert ["z: tuning, final run", "1.5, 2"] in page.tables["Settings of the tuning"]
    assert (path / "tuned.toml").read_text() in page.text
    again = (
        "fedjaxsim tune tuned.toml --learning-rate 0.1 --wrt learning-rate --seeds 2 --steps 2 "
        "--rule adam --public-data 'csv:a file.csv' --compare-grid 2 --out DIR"
    )
    assert again in page.text
    write_tuning(tmp_path / "alone", grid=None)
    assert main(["report", str(tmp_path / "alone")]) == 0
    assert "Grid" not in read(tmp_path / "alone" / "report.html").tables


def test_what_users_name_stays_text(tmp_path):
    path = write_run(tmp_path / "<script>alert(1)<", "<b>mine</b>", [0, 1, 1, 1],
                     names=(NASTY, *"bcde"))  # fmt: skip
    assert main(["report", str(path)]) == 0
    page = read(path / "report.html")
    assert not page.tags & {"script", "b"}
    assert page.headings[0][1] == "<b>mine</b> linear on csv:x.csv"
    assert page.tables["Test metrics after the last round"][1][0] == "<script>alert(1)<"
    assert page.tables["Clients with the worst values"][1][0] == NASTY


def test_nothing_is_loaded_and_all_can_be_read_aloud(run):
    source = (run / "report.html").read_text()
    page = Page(source)
    assert {part.partition(":")[0] for part in page.loads if part[0] != "#"} == {"data"}
    assert "default-src 'none'" in source
    style = source[source.index("<style>") : source.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert all(page.alternatives)
    assert set(page.scopes) == {"col", "row"}
    levels = [level for level, _ in page.headings]
    assert all(below <= above + 1 for above, below in itertools.pairwise(levels))


def test_a_run_without_test_rows_or_old_files_has_dashes(tmp_path):
    path = write_run(tmp_path / "none", "fedavg", [math.nan] * 4)
    summary = json.loads((path / "summary.json").read_text())
    old = {k: v for k, v in summary.items() if not k.endswith(("_bytes", "_std", "_tenth"))}
    (path / "summary.json").write_text(json.dumps(old))
    assert main(["report", str(path)]) == 0
    page = read(path / "report.html")
    assert ["total up", "–"] in page.tables["Costs"]
    assert "Clients with the worst values" not in page.tables


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "report needs the directory of a run, sweep or tuning, got none"),
        (["absent"], "no directory absent"),
        (["empty"], "empty holds no config.toml: not a run"),
        (["one", "one"], "several runs needs --out FILE.html"),
        (["one", "--out", "page.pdf"], "out must be a .html file"),
        (["one", "--out", "absent/page.html"], "in a folder that exists"),
        (["one", "sweep", "--out", "page.html"], "sweep holds a sweep, and only runs"),
        (["tuning", "one", "--out", "page.html"], "tuning holds a tuning, and only runs"),
        (["sweep"], "sweep holds no report.json: not a sweep, or not a finished one"),
        (["tuning"], "tuning holds no tuned.toml: not a tuning, or not a finished one"),
        (["unended"], "run holds no summary.json: not a run, or not a finished one"),
        (["old"], "old is damaged: it does not hold what a tuning writes"),
        (["cut"], "cut is damaged: it does not hold what a tuning writes"),
        (["damaged"], "damaged/clients.csv is damaged"),
        (["unknown"], "unknown/guarantee.json is damaged: it is no privacy report"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    arguments, message, run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "one", "sweep"):
        (tmp_path / name).mkdir()
    (tmp_path / "sweep" / "sweep.toml").touch()
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / "path.json").touch()
    write_tuning(tmp_path / "old", asked={})
    record = json.loads((write_tuning(tmp_path / "cut") / "path.json").read_text())
    del record["stopped"]  # which the template alone reads
    write_json(tmp_path / "cut" / "path.json", record)
    write_tuning(tmp_path / "unended")
    (tmp_path / "unended" / "run" / "summary.json").unlink()
    for name, file, content in (
        ("damaged", "clients.csv", "name,train_rows,test_rows\na,b,c\n"),
        ("unknown", "guarantee.json", '{"zero_out": {"joint_dp": {"pld": {}}}}'),
    ):
        shutil.copytree(run, tmp_path / name)
        (tmp_path / name / file).write_text(content)
        (tmp_path / name / "report.html").unlink()
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.rglob("*.html"))


# --- in a browser ---------------------------------------------------------------------------------


def browse(page, folder) -> tuple[str, str, list[str]]:
    """The page as a browser has built it, what it said of it, and where it asked for anything."""
    assert BROWSER is not None
    folder.mkdir()
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}",
        "--enable-logging=stderr", f"--log-net-log={folder / 'net.json'}", "--dump-dom",
    ]  # fmt: skip
    done = subprocess.run(
        [BROWSER, *flags, page.as_uri()], capture_output=True, text=True, timeout=HANGS, check=True
    )
    events = [
        event.get("params", {}) for event in json.loads((folder / "net.json").read_text())["events"]
    ]
    # The browser's own requests have no origin.
    own = [each for each in events if each.get("initiator", "not an origin") != "not an origin"]
    asked = [each["url"] for each in own if not each["url"].startswith(("file:", "data:"))]
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(said), asked


@pytest.mark.thorough
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (Debian: chromium)")
def test_a_browser_shows_real_reports_without_an_error_and_asks_for_nothing(tmp_path):
    small = "data = 'digits'\nclients = 6\nrounds = 2\nsampling-rate = 1\nnoise-multiplier = 2\n"
    (tmp_path / "run.toml").write_text(small)
    (tmp_path / "sweep.toml").write_text(f"{small}clip = 1\n[sweep]\nlearning-rate = [0.1, 0.2]\n")
    for seed in ("0", "1"):
        out = ["--out", str(tmp_path / seed), "--quiet"]
        assert main(["run", str(tmp_path / "run.toml"), "--seed", seed, *out]) == 0
    out = ["--out", str(tmp_path / "sweep"), "--quiet"]
    assert main(["sweep", str(tmp_path / "sweep.toml"), *out]) == 0
    both = tmp_path / "both.html"
    assert main(["report", str(tmp_path / "0")]) == 0
    assert main(["report", str(tmp_path / "sweep")]) == 0
    assert main(["report", str(tmp_path / "0"), str(tmp_path / "1"), "--out", str(both)]) == 0
    tuning = write_tuning(tmp_path / "tuned")
    assert main(["report", str(tuning)]) == 0
    named = [tmp_path / "0", tmp_path / "sweep", tuning]
    pages = [*(folder / "report.html" for folder in named), both]
    for index, path in enumerate(pages):
        built, said, asked = browse(path, tmp_path / f"browser-{index}")
        assert said == ""
        assert asked == []
        assert Page(built).tables == read(path).tables
    # Loaded addresses and failures would be noticed.
    (tmp_path / "bad.html").write_text("<img src=http://example.com/x.png><script>f()</script>")
    _, said, asked = browse(tmp_path / "bad.html", tmp_path / "browser-bad")
    assert "f is not defined" in said
    assert set(asked) == {"http://example.com/x.png"}
    # The sweep's numbers are those of its table.
    import pyarrow.parquet as pq

    rows = pq.read_table(tmp_path / "sweep" / "results.parquet").to_pylist()
    best = max((row for row in rows if row["round"] == 2), key=lambda row: row["test_accuracy"])
    title = "test accuracy (fraction) over the clients of the best settings"
    headings, shown = read(pages[1]).tables[title]
    found = dict(zip(headings, shown, strict=True))
    assert found["value"] == f"{best['test_accuracy']:.4f}"
    assert found["worst tenth"] == f"{best['test_accuracy_worst_tenth']:.4f}"
