"""`fedjaxsim ls`: what lies in a folder, from its files alone."""

import re
from pathlib import Path

import pytest
import tomli_w
from support.json_schemas import SCHEMAS, SUMMARY
from support.written_runs import write_run

from fedjaxsim.cli import main
from fedjaxsim.cli.flags import Command
from fedjaxsim.cli.program import COMMANDS
from fedjaxsim.report.files import write_json


def test_runs_sweeps_and_tunings_are_listed_and_found_by_tag(tmp_path, monkeypatch, ask, ask_json):
    monkeypatch.chdir(tmp_path)
    for name, value in (("a", 0.5), ("b", 0.25)):
        write_run(tmp_path / "runs" / "one" / name, "fedavg", value)
    labels = {"known_as": {"name": "my best", "tags": ["paper", "ε"]}}
    with (tmp_path / "runs/one/b/config.toml").open("ab") as file:
        tomli_w.dump(labels, file)
    begun = tmp_path / "runs" / "begun"
    begun.mkdir()
    (begun / "config.toml").write_text("rounds = 7\n")
    (begun / "metrics.jsonl").write_text('{"round": 3}\n')
    sweep = tmp_path / "runs" / "sweep"
    sweep.mkdir()
    (sweep / "sweep.toml").write_text("[resolved]\nruns = 4\n")
    (sweep / "report.json").write_text('{"summary": {"finished": 3}}')
    tuning = tmp_path / "runs" / "tuning"
    tuning.mkdir()
    steps = [{"value": v, "accepted": a} for v, a in ((0.9, True), (0.7, True), (0.8, False))]
    write_json(tuning / "path.json", {
        "asked": {"steps": 5, "wrt": ["lam"]}, "metric": "loss", "steps": steps,
    })  # fmt: skip
    (tuning / "tuned.toml").write_text('algorithm = "pmtl"\ndata = "csv:a/b.csv"\n')
    rows = ask_json("ls")
    assert [(row["path"], row["kind"], row["rounds"]) for row in rows] == [
        ("runs/begun", "run", "3 of 7"),
        ("runs/one/a", "run", "4"),
        ("runs/one/b", "run", "4"),
        ("runs/sweep", "sweep", "3 of 4 runs"),
        ("runs/tuning", "tuning", "2 of 5 steps"),
    ]
    last = rows[-1]
    assert (last["metric"], last["tuned"], last["algorithm"], last["data"]) == (
        0.7, ["lam"], "pmtl", "b",
    )  # fmt: skip
    [found] = ask_json("ls runs --tag paper")
    assert (found["name"], found["metric"], found["algorithm"]) == ("my best", 0.25, "fedavg")
    assert "runs/one/b (my best)" in ask("ls")
    assert "my best" in ask("compare runs/one/a runs/one/b")


def test_a_damaged_folder_is_listed_with_its_problem(tmp_path, capsys):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sweep.toml").write_text("= 3")
    assert main(["ls", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "broken" in shown.out
    assert "is damaged" in shown.err


@pytest.mark.parametrize("words", ["ls absent", "ls --tag"])
def test_a_folder_that_is_not_there_is_refused(refused, words):
    refused(words)


def test_every_json_has_a_schema():
    printing = {name for name, path in COMMANDS.items() if "json" in Command.find(name, path).flags}
    assert printing == {*SCHEMAS}


def test_the_page_states_the_keys_of_each_schema():
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text("utf-8")
    section = page.partition("## JSON")[2]
    [summary] = re.findall(r"^`summary.json` has (.*)$", section, re.MULTILINE)
    parts_of_names = {"train_", "test_", "validation_", "_seconds", "example_", "audit_"}
    stated = {*re.findall(r"`(\w+)`", summary)} - parts_of_names
    assert stated == {*SUMMARY, "epsilon_spent"}
    [systems] = re.findall(r"`systems` \((.*?)\)", section)
    properties = SCHEMAS["compare"]["properties"]
    assert {*re.findall(r"`(\w+)`", systems)} == {*properties["systems"]["items"]["properties"]}
    rows = re.findall(r"^\| `(\w+)` \| (.*`.*) \|$", section, re.MULTILINE)
    stated = {name: {*re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", row))} for name, row in rows}
    entries = {name: schema.get("items", schema) for name, schema in SCHEMAS.items()}
    assert stated == {name: {*entry["properties"]} for name, entry in entries.items()}
