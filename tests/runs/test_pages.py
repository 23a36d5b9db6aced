"""The report of runs has the numbers of their files."""

import json
import math

import pytest
from report_pages import read, write_reported, write_run

from fedjaxsim.cli import main
from fedjaxsim.privacy.guarantee import Report


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_reported(tmp_path_factory.mktemp("runs") / "one")


def test_a_run_says_what_its_files_hold(run):
    page = read(run / "report.html")
    assert page.headings[0] == (1, "fedavg linear on csv:x.csv")
    assert [text for _, text in page.headings[1:]] == [
        "Results", "Privacy", "Clients, communication, time and memory", "Settings",
    ]  # fmt: skip
    _, results = page.tables["Test metrics after the last round"]
    assert results[:2] == ["one", "0.500"]
    # By hand: of 0.1, 0.5, 0.6 and 0.8 the mean is 0.5, the squared deviations add up to 0.26, and
    # a tenth of four clients is the worst of them.
    summary = dict(page.tables["Summary"][1:])
    assert summary["test accuracy"] == "0.5"
    assert summary["test accuracy std"] == f"{math.sqrt(0.26 / 4):.4g}"
    assert summary["test accuracy worst tenth"] == "0.1"
    assert [summary[f"test accuracy p{k}"] for k in (10, 50, 90)] == ["0.22", "0.55", "0.74"]
    assert (summary["message bytes"], summary["compile seconds"]) == ("2.6 kB", "0.5 s")
    assert summary["peak bytes"] == "123.5 MB"
    assert "fedjaxsim run config.toml --out DIR" in page.text
    assert (run / "config.toml").read_text() in page.text


def test_the_guarantee_is_that_of_the_file(run):
    page = read(run / "report.html")
    stored = Report.from_json(json.loads((run / "guarantee.json").read_text()))
    assert str(stored) in page.text
    assert "ε = 2.3178 at δ = 0.01" in str(stored)  # µ = √4/2 = 1


def test_what_promises_nothing_says_why(tmp_path):
    run = write_run(tmp_path / "none", "fedavg", [0.1, 0.5, 0.6, 0.8], noise=0.0)
    main(["report", str(run)])
    assert "no guarantee (no noise was added" in read(run / "report.html").text


def test_runs_side_by_side_are_compared_over_their_seeds(tmp_path):
    values = {("pmtl", 0): 0.5, ("pmtl", 1): 0.7, ("fedavg", 0): 0.4, ("fedavg", 1): 0.4}
    for (algorithm, seed), value in values.items():
        write_run(tmp_path / f"{algorithm}-{seed}", algorithm, [value, 0, 1, value], seed=seed)
    paths = [str(tmp_path / f"{algorithm}-{seed}") for algorithm, seed in values]
    out = tmp_path / "all.html"
    assert main(["report", *paths, "--out", str(out)]) == 0
    page = read(out)
    assert page.headings[0] == (1, "4 runs side by side")
    names = ["pmtl-0", "pmtl-1", "fedavg-0", "fedavg-1"]
    assert [row[0] for row in page.tables["Test metrics after the last round"][1:]] == names
    assert page.tables["Summary"][0] == ["", *names]
    # Means over clients (2·value + 1)/4: 0.5 and 0.6 of pmtl, 0.45 twice of fedavg.
    title = "Means over seeds with 95 % intervals; differences are paired by seed"
    _, first, second = page.tables[title]
    assert (first[0], first[1], first[2][:5]) == ("pmtl", "2", "0.550")
    assert (second[0], second[2:4], second[4][:6]) == (
        "fedavg", ["0.450 ± 0.000", "0.000"], "-0.100",
    )  # fmt: skip
    assert len(page.alternatives) == 2
    assert "published under its own: pmtl-0, fedavg-0; pmtl-1, fedavg-1." in out.read_text()


def test_a_run_without_test_rows_has_dashes(tmp_path):
    path = write_run(tmp_path / "none", "fedavg", [math.nan] * 4)
    assert main(["report", str(path)]) == 0
    assert ["test accuracy", "–"] in read(path / "report.html").tables["Summary"]
