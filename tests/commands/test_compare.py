"""`fedjaxsim compare` of runs as files, and of what is no run; `test_run.py` compares runs."""

import csv
import html
import io
import json
import re
import shlex
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
import tomli_w
from support.written_runs import write_run

import fedjaxsim as fjs
from fedjaxsim.metrics import Metric, metrics_to_tables
from fedjaxsim.privacy.guarantee import Report
from fedjaxsim.report.figures import clients_figure
from fedjaxsim.report.page import page
from fedjaxsim.report.tables import TextTable
from fedjaxsim.runs.comparison import compare


def test_a_page_has_what_the_files_hold_and_loads_nothing(tmp_path, monkeypatch, ask):
    monkeypatch.chdir(tmp_path)
    values = {"pmtl-0": 0.5, "pmtl-1": 0.6, "fedavg-0": 0.45, "<b>-1": 0.45}
    for name, value in values.items():
        algorithm = "pmtl" if "pmtl" in name else "fedavg"
        write_run(tmp_path / name, algorithm, value, seed=int(name[-1]))
    said = ask(f"compare {shlex.join(values)} --out page.html")
    # By hand: means 0.55 and 0.45 over seeds, whose differences are 0.05 and 0.15.
    assert re.search(r"fedavg +2 +0.450 ± 0.000 +0.000 +-0.100", said)
    frame = fjs.compare(values, out="same.html").set_index("system")
    assert (tmp_path / "same.html").read_bytes() == (tmp_path / "page.html").read_bytes()
    assert frame["mean"].to_dict() == pytest.approx({"pmtl": 0.55, "fedavg": 0.45})
    assert frame.loc["fedavg", "difference"] == pytest.approx(-0.1)
    assert frame.loc["fedavg", "epsilon"] == pytest.approx(2.3178, abs=1e-3)
    assert "published under its own: pmtl-0, fedavg-0; pmtl-1, <b>-1." in said
    page = (tmp_path / "page.html").read_text()
    elements = Elements()
    elements.feed(page)
    assert elements.open == []
    # Nothing is loaded: pictures and files to save are inside, and links lead to the runs.
    assert [at.partition(":")[0] for name, at in elements.addresses if name == "src"] == ["data"]
    links = {at for name, at in elements.addresses if name == "href" and at[:5] != "data:"}
    assert links == set(values)
    stored = Report.from_json(json.loads((tmp_path / "pmtl-0" / "guarantee.json").read_text()))
    assert "ε = 2.3178 at δ = 0.01" in str(stored)  # µ = √4/2 = 1
    means, runs, differ = elements.tables
    assert means[2] == [
        "FedAvg",
        "2",
        "0.450 ± 0.000",
        "0.000",
        "-0.100 ± 0.635",
        "0.2952",
        "2.3178",
    ]  # t = −2
    assert [row[:2] for row in runs[1:]] == [[k, f"{v:.3f}"] for k, v in values.items()]
    assert differ[:2] == [["run", "algorithm", "seed"], ["pmtl-0", "pmtl", "0"]]
    assert all(text in html.unescape(page) for text in (str(stored), 'algorithm = "pmtl"'))


class Elements(HTMLParser):
    """The addresses in a page, the text of its tables by row, and what is left open."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[tuple[str, str]] = []
        self.tables: list[list[list[str]]] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.addresses += [(k, str(value)) for k, value in attrs if k in ("src", "href")]
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & {*self.open}:
            self.tables[-1][-1][-1] += data


_STUB = """
const rows = CELLS.map(text => ({cells: [{textContent: text}]}));
const body = {rows, append: (...sorted) => { body.rows = sorted; }};
const head = {cellIndex: 0, dataset: {}, closest: () => ({tBodies: [body]})};
const document = {querySelectorAll: () => [head]};
SCRIPT
const orders = [];
for (const click of [1, 2]) {
  head.onclick();
  orders.push(body.rows.map(row => row.cells[0].textContent));
}
console.log(JSON.stringify(orders));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize(
    ("cells", "ordered"),
    [
        (["0.3", "–", "-2", "10", "∞"], ["-2", "0.3", "10", "∞", "–"]),
        (["0.52 ± 0.1", "0.5"], ["0.5", "0.52 ± 0.1"]),
        (["pmtl", "ditto"], ["ditto", "pmtl"]),
    ],
)
def test_a_click_on_a_heading_sorts_a_table_both_ways(cells, ordered):
    text = page("Runs", "", [], {}, [], {}, {}).decode()
    script = text.partition("<script>")[2].partition("</script>")[0]
    program = _STUB.replace("CELLS", json.dumps(cells)).replace("SCRIPT", script)
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    rising, falling = json.loads(done.stdout)
    assert rising == ordered
    words = [cell for cell in ordered if cell == "–"]
    assert falling == [cell for cell in ordered[::-1] if cell not in words] + words


def test_tables_for_latex_and_csv_escape_what_is_special():
    table = TextTable("A_b", ["run", "ε ≤"], [["50 %_x", "-0.5 ± 0.1"], ['a,"b"', "–"]])
    rows = [r"50 \%\_x & $-0.5$ $\pm$ 0.1 \\", r'a,"b" & -- \\']
    lines = ["% A_b", r"\begin{tabular}{lr}", r"\toprule", r"run & $\varepsilon$ $\le$ \\"]
    lines += [r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", ""]
    assert table.latex == "\n".join(lines)
    assert list(csv.reader(io.StringIO(table.csv))) == [list(table.headings), *table.rows]


def test_files_for_papers_have_the_tables_and_all_digits(tmp_path, monkeypatch, ask):
    monkeypatch.chdir(tmp_path)
    for name, value in (("pmtl-0", 0.5), ("pmtl-1", 1 / 3)):
        write_run(tmp_path / name, "pmtl", value, seed=int(name[-1]))
        clients = "name,train_rows,test_rows,test_accuracy\na,9,3,0.25\nb,2,1,0.75\nc,1,0,\n"
        (tmp_path / name / "clients.csv").write_text(clients)
    assert "written to t.tex" in ask("compare pmtl-0 pmtl-1 --out t.tex")
    assert r"PMTL & 2 & 0.417 $\pm$ 1.059" in (tmp_path / "t.tex").read_text()
    heads = r"accuracy client mean & accuracy p10 & accuracy p90 & $\varepsilon$ zero-out \\"
    assert heads in (tmp_path / "t.tex").read_text()  # ε of both is the same, and is printed
    assert "pmtl-0 & 2 & 0.250 & 0.500 & 0.750" in (tmp_path / "t.tex").read_text()  # by hand
    ask("compare pmtl-0 pmtl-1 --out t.csv")
    with (tmp_path / "t.csv").open() as file:
        assert [float(row["test_accuracy"]) for row in csv.DictReader(file)] == [0.5, 1 / 3]
    ask("compare pmtl-0 pmtl-1 --out t.html")
    assert (tmp_path / "t.html").read_text().count("<img") == 2  # curves, and clients


def test_runs_of_one_name_are_told_apart_and_draw_from_one_key(tmp_path):
    for folder in ("a", "b"):
        write_run(tmp_path / folder, "fedavg", 0.5)
        with (tmp_path / folder / "config.toml").open("a") as file:
            file.write('[known_as]\nname = "best"\n')
    found = compare([tmp_path / "a", tmp_path / "b"])
    assert [run.name for run in found.runs] == ["best (a)", "best (b)"]
    assert "best (a)" in found.drawn_twice


def test_runs_that_are_worse_than_a_constant_are_named(tmp_path, ask):
    for name in ("good", "bad"):
        write_run(tmp_path / name, "fedavg", 0.5)
    summary = json.loads((tmp_path / "bad" / "summary.json").read_text())
    summary["worse_than_constant"] = "nMSE 5, while one constant for all has 1"
    (tmp_path / "bad" / "summary.json").write_text(json.dumps(summary))
    wanted = "of no use yet are the models of bad: nMSE 5, while one constant for all has 1\n"
    assert wanted in ask(f"compare {tmp_path / 'good'} {tmp_path / 'bad'}")
    assert "of no use" not in ask(f"compare {tmp_path / 'good'}")


@pytest.mark.parametrize(
    ("changed", "count"),
    [
        ({"rounds_planned": 8, "rounds": 8}, 2),  # it was extended
        ({"interrupted": True, "rounds": 3}, 2),
        ({"rounds": 3, "stopped_early": True}, 1),
    ],
)
def test_a_mean_is_over_runs_of_as_many_rounds(tmp_path, changed, count):
    for seed in (0, 1):
        write_run(tmp_path / str(seed), "fedavg", 0.5, seed=seed)
        config = tmp_path / str(seed) / "config.toml"
        config.write_text(f"rounds = 4\n{config.read_text()}")
    summary = tmp_path / "1" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | changed))
    assert len(compare([tmp_path / "0", tmp_path / "1"]).systems) == count


def test_stages_after_other_runs_are_other_systems(tmp_path):
    for seed, before in enumerate(["fedavg", "fedprox", "fedavg"]):
        write_run(tmp_path / str(seed), "finetune", 0.5, seed=seed)
        with (tmp_path / str(seed) / "config.toml").open("a") as file:
            file.write(f'[[stages]]\nalgorithm = "{before}"\nrounds = 9\n')
    found = compare([tmp_path / str(seed) for seed in range(3)]).systems
    assert [[*system.runs] for system in found] == [[0, 2], [1]]
    assert found[0].label == "finetune, after fedavg (9 rounds)"


@pytest.mark.parametrize(
    ("larger_is_better", "ends"),
    [(True, ("worst", "best")), (None, ("lowest", "highest"))],
)
def test_a_metric_without_a_direction_has_no_worst_clients(tmp_path, larger_is_better, ends):
    write_run(tmp_path / "a", "fedavg", 0.5)
    clients = "name,train_rows,test_rows,test_accuracy\na,9,3,0.25\nb,2,1,0.75\n"
    (tmp_path / "a" / "clients.csv").write_text(clients)
    record = Metric("accuracy", larger_is_better=larger_is_better)
    with (tmp_path / "a" / "config.toml").open("ab") as file:
        tomli_w.dump({"resolved": {"metrics": metrics_to_tables({"accuracy": record})}}, file)
    found = compare([tmp_path / "a"])
    [table] = [each for each in found.tables() if each.title == "accuracy of each client"]
    assert (table.headings[2], table.headings[4]) == tuple(f"mean of the\n{x} tenth" for x in ends)
    rows, values = np.array([9, 2]), np.array([0.25, 0.75])
    figure = clients_figure([("a", rows, values)], record)
    assert len(figure.axes[0].lines) == (1 if larger_is_better is None else 2)


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


def test_a_metric_that_a_run_lacks_is_refused_with_the_name_of_the_run(tmp_path):
    write_run(tmp_path / "a", "fedavg", 0.5)
    write_run(tmp_path / "b", "fedavg", 0.5)
    metrics = tmp_path / "a" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"test_a', '"test_loss": 1.0, "test_a'))
    with pytest.raises(ValueError, match=r"^b has no metric 'loss', only accuracy$"):
        compare([tmp_path / "a", tmp_path / "b"], metric="loss")
