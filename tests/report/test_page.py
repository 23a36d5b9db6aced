"""Reports as HTML: text that stays text, nothing from elsewhere, and errors."""

import itertools
import json
import re
import shutil
import subprocess

import pytest
from problems import HANGS
from report_pages import Page, read, write_reported, write_run

from fedjaxsim.cli import main

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_reported(tmp_path_factory.mktemp("runs") / "one")


def test_what_users_name_stays_text(tmp_path):
    path = write_run(tmp_path / "<script>alert(1)<", "<b>mine</b>", [0, 1, 1, 1])
    assert main(["report", str(path)]) == 0
    page = read(path / "report.html")
    assert not page.tags & {"script", "b"}
    assert page.headings[0][1] == "<b>mine</b> linear on csv:x.csv"
    assert page.tables["Test metrics after the last round"][1][0] == "<script>alert(1)<"


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "report"),
        (["absent"], "absent"),
        (["empty"], "empty .*config.toml"),
        (["one", "one"], "--out"),
        (["one", "--out", "page.pdf"], "out .*.html"),
        (["one", "--out", "absent/page.html"], "folder"),
        (["sweep", "one", "--out", "page.html"], "sweep holds a sweep"),
        (["tuning", "one", "--out", "page.html"], "tuning"),
        (["sweep"], "sweep holds a sweep: .*results.parquet"),
        (["tuning"], "tuning holds a tuning: .*tuned.toml"),
        (["damaged"], "damaged/clients.csv is damaged"),
        (["unknown"], "unknown/guarantee.json is damaged"),
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
    for name, file, content in (
        ("damaged", "clients.csv", "name,train_rows,test_rows\na,b,c\n"),
        ("unknown", "guarantee.json", '{"zero_out": {"joint_dp": {"pld": {}}}}'),
    ):
        shutil.copytree(run, tmp_path / name)
        (tmp_path / name / file).write_text(content)
        (tmp_path / name / "report.html").unlink()
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
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
    for seed in ("0", "1"):
        out = ["--out", str(tmp_path / seed), "--quiet"]
        assert main(["run", str(tmp_path / "run.toml"), "--seed", seed, *out]) == 0
    both = tmp_path / "both.html"
    assert main(["report", str(tmp_path / "0")]) == 0
    assert main(["report", str(tmp_path / "0"), str(tmp_path / "1"), "--out", str(both)]) == 0
    pages = [tmp_path / "0" / "report.html", both]
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
