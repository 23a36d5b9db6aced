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
    # The headline is that of seeds which the tuning has not seen.
    assert "loss fell by0.300 ± 0.100on 2 fresh seeds" in page.text.replace("\n", "")
    assert "From the start, the loss fell by 0.300 ± 0.100 on 2 fresh seeds" in page.text
    # By hand: of 2 and 1 the deviation is √½; t of one degree of freedom is 12.706.
    headings, start, tuned = page.tables[
        "Means over 2 seeds with 95 % intervals, on validation rows of the run's own clients"
    ]
    assert headings == ["", "η", "the tuning's seeds", "fresh seeds"]
    assert start == ["start", "0.1", "1.500 ± 6.353", "1.500 ± 5.082"]
    assert tuned == ["tuned", "0.25", "1.200 ± 3.812", "1.200 ± 3.812"]
    assert page.tables["Steps of the descent; step 0 is the start, step 1 the best"][2:] == [
        ["1", "0.25", "1.200 ± 3.812", "8", "kept"],
        ["2", "4", "1 of 2 failed", "12", "taken back"],
    ]
    # The guarantee and the spread over clients are the final run's.
    assert page.tables["Test metrics after the last round"][1][:2] == ["final run", "0.500"]
    assert "ε = 2.3178 zero-out" in page.text
    assert len(page.alternatives) == 3
    assert ["z: tuning, final run", "1.5, 2"] in page.tables["Settings of the tuning"]
    assert (path / "tuned.toml").read_text() in page.text
    write_tuning(tmp_path / "untested", test=None)
    assert main(["report", str(tmp_path / "untested")]) == 0
    assert "not tested on fresh seeds" in read(tmp_path / "untested" / "report.html").text


def test_a_tuning_by_a_metric_without_a_record_is_titled_by_its_name(tmp_path):
    path = write_tuning(tmp_path / "tuned")
    file = path / "path.json"
    file.write_text(file.read_text().replace('"loss"', '"squared_error"'))
    assert main(["report", str(path)]) == 0
    assert "the squared error fell by 0.300 ± 0.100" in read(path / "report.html").text
