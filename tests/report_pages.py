"""Reports as HTML: the files that they are made of, and their contents."""

import re
from html.parser import HTMLParser

import numpy as np

from fedjaxsim.cli import main
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.privacy.entries import Drawn, Entry, SamplingScheme
from fedjaxsim.privacy.events import Gaussian, PrivacySpend
from fedjaxsim.privacy.guarantee import report
from fedjaxsim.report.files import lines, write_csv, write_json
from fedjaxsim.report.plots import content, picture
from fedjaxsim.runs.directory import RunDirectory

PICTURE = content(picture("Curves", 2, 1))


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
    charged = PrivacySpend(SamplingScheme("full", 5, 5), Gaussian(), (Entry(noise, 1.0, 4),))
    found = report([charged], 0.01, draws=(Drawn(f"d{seed}", 4),))
    spent = found.find("zero_out").epsilon
    last = {"train_loss": 0.5, **evaluation.summary(), "epsilon": spent}
    resolved = {"data_fingerprint": f"f1d0{seed}"}
    config = {"algorithm": algorithm, "data": "csv:x.csv", "model": "linear", "seed": seed}
    directory.write_config(config | {"resolved": resolved, "versions": {"fedjaxsim": "0.1.0"}})
    records = [{"round": 0, **last, "epsilon": 0.0}, {"round": 4, **last}]
    (path / "metrics.jsonl").write_bytes(lines(records))
    write_json(path / "guarantee.json", found.to_json())
    columns = {"name": list(names), "train_rows": [7] * 5, "test_rows": count}
    write_csv(path / "clients.csv", columns | {"test_accuracy": evaluation.values["accuracy"]})
    (path / "curves.png").write_bytes(PICTURE)
    write_json(path / "summary.json", {
        "algorithm": algorithm, "data": "csv:x.csv", "model": "linear", "rounds": 4,
        "rounds_planned": 4, "interrupted": False, **last, "epsilon_replace": None, "delta": 0.01,
        "rounds_per_second": 2.0, "compile_seconds": 0.5, "message_bytes": 2600,
        "server_bytes": 5200, "cohort": 5.0, "peak_bytes": 123_456_789,
    })  # fmt: skip
    return path


def write_reported(path):
    """A run as files, and its report."""
    write_run(path, "fedavg", [0.1, 0.5, 0.6, 0.8])
    assert main(["report", str(path)]) == 0
    return path


def read(path) -> Page:
    return Page(path.read_text(encoding="utf-8"))
