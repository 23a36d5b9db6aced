"""`fedjaxsim compare` of runs as files, and of what is no run; `test_run.py` compares runs."""

import html
import json
import re
import shlex

import pytest

from fedjaxsim.privacy.entries import Drawn, Entry, SamplingScheme
from fedjaxsim.privacy.events import Gaussian, PrivacySpend
from fedjaxsim.privacy.guarantee import Report, report
from fedjaxsim.report.files import lines, write_json
from fedjaxsim.runs.directory import RunDirectory


def write_run(path, algorithm, value, *, seed=0, noise=2.0):
    """Write the files of a run of 5 clients with a test accuracy."""
    charged = PrivacySpend(SamplingScheme("full", 5, 5), Gaussian(), (Entry(noise, 1.0, 4),))
    found = report([charged], 0.01, draws=(Drawn(f"d{seed}", 4),))
    last = {"test_accuracy": value, "epsilon": found.find("zero_out").epsilon}
    config = {"algorithm": algorithm, "data": "csv:x.csv", "model": "linear", "seed": seed}
    RunDirectory.create(path).write_config(config)
    records = [{"round": 0, **last, "epsilon": 0.0}, {"round": 4, **last}]
    (path / "metrics.jsonl").write_bytes(lines(records))
    write_json(path / "guarantee.json", found.to_json())
    write_json(path / "summary.json", {
        "algorithm": algorithm, "data": "csv:x.csv", "model": "linear", "rounds": 4,
        "rounds_planned": 4, "interrupted": False, **last, "epsilon_replace": None, "delta": 0.01,
        "rounds_per_second": 2.0,
    })  # fmt: skip


def test_a_page_has_what_the_files_hold_and_loads_nothing(tmp_path, monkeypatch, ask):
    monkeypatch.chdir(tmp_path)
    values = {"pmtl-0": 0.5, "pmtl-1": 0.6, "fedavg-0": 0.45, "<b>-1": 0.45}
    for name, value in values.items():
        algorithm = "pmtl" if "pmtl" in name else "fedavg"
        write_run(tmp_path / name, algorithm, value, seed=int(name[-1]))
    said = ask(f"compare {shlex.join(values)} --out page.html")
    # By hand: means 0.55 and 0.45 over seeds, whose differences are 0.05 and 0.15.
    assert re.search(r"fedavg +2 +0.450 ± 0.000 +0.000 +-0.100", said)
    assert "published under its own: pmtl-0, fedavg-0; pmtl-1, <b>-1." in said
    page = (tmp_path / "page.html").read_text()
    assert set(re.findall(r"<(\w+)", page)) == {"meta", "title", "p", "img", "pre"}
    assert re.findall(r"(?:src|href)=.(\w+:)", page) == ["data:"]
    stored = Report.from_json(json.loads((tmp_path / "pmtl-0" / "guarantee.json").read_text()))
    assert "ε = 2.3178 at δ = 0.01" in str(stored)  # µ = √4/2 = 1
    config = (tmp_path / "pmtl-0" / "config.toml").read_text()
    assert all(text in html.unescape(page) for text in (said, str(stored), config))


def test_what_promises_nothing_says_why(tmp_path, ask):
    write_run(tmp_path / "none", "fedavg", 0.5, noise=0.0)
    ask(f"compare {tmp_path}/none --out {tmp_path}/page.html")
    assert "no guarantee (no noise was added" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "directory"),
        ("absent", "absent"),
        (".", "config.toml"),
        (". .", "config.toml"),
        (". --out curves.gif", "curves.gif"),
        ("--out c.png", "directory"),
    ],
)
def test_what_is_no_run_is_refused(refused, arguments, words):
    assert words in refused(f"compare {arguments}")
