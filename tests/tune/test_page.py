"""The report of a tuning has the numbers of its files."""

from report_pages import NASTY, read, write_tuning

from fedjaxsim.cli import main


def test_a_tuning_says_what_its_files_hold(tmp_path):
    path = write_tuning(tmp_path / "tuned")
    assert main(["report", str(path)]) == 0
    page = read(path / "report.html")
    assert page.headings[0] == (1, "Tuning of pmtl linear on csv:x.csv")
    assert [name for _, name in page.headings[1:4]] == ["Pictures", "Results", "Points tried"]
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


def test_a_tuning_by_a_metric_without_a_record_is_titled_by_its_name(tmp_path):
    path = write_tuning(tmp_path / "tuned")
    file = path / "path.json"
    file.write_text(file.read_text().replace('"loss"', '"squared_error"'))
    assert main(["report", str(path)]) == 0
    assert "The squared error fell by 0.3 ± 0.2" in read(path / "report.html").text
