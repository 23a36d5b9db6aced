"""The report of runs has the numbers of their files."""

import json
import math

import pytest
from report_pages import read, write_reported, write_run

from fedjaxsim.cli import main
from fedjaxsim.privacy.events import Entry, Gaussian, PrivacySpend, SamplingScheme
from fedjaxsim.privacy.guarantee import report
from fedjaxsim.report.files import write_json


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_reported(tmp_path_factory.mktemp("runs") / "one")


def test_a_run_says_what_its_files_hold(run):
    page = read(run / "report.html")
    assert page.headings[0] == (1, "fedavg linear on csv:x.csv")
    assert [text for _, text in page.headings[1:]] == [
        "Pictures", "Results", "Clients", "Privacy", "Communication, time and memory", "Settings",
        "Reproduction",
    ]  # fmt: skip
    assert "0.5000worst tenth 0.1000" in page.text
    assert "ε ≤ 2.318δ = 0.01, zero-out, joint DP" in page.text
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
    rows = page.tables["Information released about one client or example"]
    row = next(row for row in rows if "become zero" in row[0] and "all other clients" in row[1])
    sign, shown = row[2].split()
    assert (sign, row[4]) == ("=", accountant)
    assert fields["epsilon"] <= float(shown) < fields["epsilon"] * 1.0001
    assert all(sentence in page.text for sentence in fields["assumptions"])


def test_what_promises_nothing_says_why(tmp_path):
    run = write_run(tmp_path / "none", "fedavg", [0.1, 0.5, 0.6, 0.8], noise=0.0)
    main(["report", str(run)])
    page = read(run / "report.html")
    assert "Information released about one client or example" not in page.tables
    assert "no guarantee: no noise was added" in page.text


def test_the_epsilon_of_examples_has_a_card_and_a_row(tmp_path):
    run = write_run(tmp_path / "silo", "fedavg", [0.1, 0.5, 0.6, 0.8], noise=0.0)
    event = Gaussian(unit="example")
    charged = PrivacySpend(SamplingScheme("full", 5, 5), event, (Entry(2.0, 1.0, 4),))
    write_json(run / "guarantee.json", report([charged], 0.01).to_json())
    main(["report", str(run)])
    page = read(run / "report.html")
    assert "ε = ∞no guarantee for whole clients" in page.text
    # Replacing an example moves a clipped sum by 2C, so µ = 2√4/2 = 2, and the Gaussian curve
    # Φ(1 − ε/2) − e^ε Φ(−1 − ε/2) is 0.01 at ε = 5.9979.
    rows = page.tables["Information released about one client or example"]
    (row,) = (row for row in rows if row[0] == "one example of a client is replaced")
    assert float(row[2].split()[1]) == pytest.approx(5.9979, abs=1e-3)
    assert "ε ≤ 5.998" in page.text


def test_runs_side_by_side_are_compared_over_their_seeds(tmp_path):
    values = {("pmtl", 0): 0.5, ("pmtl", 1): 0.7, ("fedavg", 0): 0.4, ("fedavg", 1): 0.4}
    for (algorithm, seed), value in values.items():
        write_run(tmp_path / f"{algorithm}-{seed}", algorithm, [value, 0, 1, value], seed=seed)
    paths = [str(tmp_path / f"{algorithm}-{seed}") for algorithm, seed in values]
    out = tmp_path / "all.html"
    assert main(["report", *paths, "--out", str(out)]) == 0
    page = read(out)
    assert page.headings[0] == (1, "4 runs side by side")
    assert "FedAvg0.450 ± 0.000test accuracy (fraction); ε ≤ 2.318; 2 seeds" in page.text.replace(
        "\n", ""
    )
    assert [row[0] for row in page.tables["Test metrics after the last round"][1:]] == [
        "pmtl-0", "pmtl-1", "fedavg-0", "fedavg-1",
    ]  # fmt: skip
    # Means over clients (2·value + 1)/4: 0.5 and 0.6 of pmtl, 0.45 twice of fedavg.
    title = "Means over seeds with 95 % intervals; differences are paired by seed"
    _, first, second = page.tables[title]
    assert (first[0], first[1], first[2][:5]) == ("pmtl", "2", "0.550")
    assert (second[0], second[2:4], second[4][:6]) == (
        "fedavg", ["0.450 ± 0.000", "0.000"], "-0.100",
    )  # fmt: skip
    differ = page.tables["Settings that differ"]
    assert differ == [
        ["setting", "pmtl", "fedavg"], ["algorithm", "pmtl", "fedavg"], ["seed", "0, 1", "0, 1"],
    ]  # fmt: skip
    assert [row[2] for row in page.tables["Data and seeds"][1:]] == ["f1d00", "f1d01"] * 2
    assert len(page.alternatives) == 2
    assert "published under its own: pmtl-0, fedavg-0; pmtl-1, fedavg-1." in out.read_text()


def test_a_run_without_test_rows_or_old_files_has_dashes(tmp_path):
    path = write_run(tmp_path / "none", "fedavg", [math.nan] * 4)
    summary = json.loads((path / "summary.json").read_text())
    old = {k: v for k, v in summary.items() if not k.endswith(("_bytes", "_std", "_tenth"))}
    (path / "summary.json").write_text(json.dumps(old))
    assert main(["report", str(path)]) == 0
    page = read(path / "report.html")
    assert ["total up", "–"] in page.tables["Costs"]
    assert "Clients with the worst values" not in page.tables
