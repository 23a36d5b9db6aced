"""The history of a run: a sequence of segments, shown in short and as a table."""

import numpy as np
import pytest

from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.engine.loop import History, Segment


def segment(round_, participants, values):
    """Two rounds and an evaluation on two clients, or on one for each run."""
    evaluation = Evaluation("test", np.array([1, 1]), {"loss": np.array(values)})
    return Segment(round_, {"participants": np.array(participants)}, evaluation)


HISTORY = History([segment(2, [1, 2], [0.5, 1.5]), segment(4, [3, 3], [0.25, 0.25])])


def test_a_history_is_a_sequence_of_segments():
    first, last = HISTORY
    assert (len(HISTORY), HISTORY[0], HISTORY[-1]) == (2, first, last)
    assert History(HISTORY[1:])[0] is last
    assert [each.round for each in HISTORY[::-1]] == [4, 2]
    with pytest.raises(IndexError):
        HISTORY[2]


def test_its_table_has_a_row_per_evaluation():
    table = HISTORY.to_pandas()
    assert table["round"].tolist() == [2, 4]
    assert table["participants"].tolist() == [1.5, 3.0]  # means over a segment's rounds
    assert table["test_loss"].tolist() == [1.0, 0.25]
    assert table["test_loss_p90"].tolist() == pytest.approx([1.4, 0.25])
    assert "run" not in table


def test_its_table_of_several_runs_has_a_row_for_each():
    # Participants are shared by the runs, as cohorts are.
    table = History([segment(2, [1, 2], [[0.5, 1.0, 2.0], [1.5, 1.0, 4.0]])]).to_pandas()
    assert table["round"].tolist() == [2, 2, 2]
    assert table["run"].tolist() == [0, 1, 2]
    assert table["participants"].tolist() == [1.5, 1.5, 1.5]
    assert table["test_loss"].tolist() == [1.0, 1.0, 3.0]


def test_its_table_has_the_mean_of_all_who_took_part_whatever_cohort_was_empty():
    def of(participants, loss):
        evaluation = Evaluation("test", np.array([1]), {"loss": np.array([0.5])})
        metrics = {"participants": np.array(participants), "loss": np.array(loss)}
        return Segment(2, metrics, evaluation)

    table = History([of([1, 0, 3], [2.0, np.nan, 6.0]), of([0], [np.nan])]).to_pandas()
    assert table["loss"].tolist() == [5.0, pytest.approx(np.nan, nan_ok=True)]
    several = History([of([1, 0], [[2.0, 4.0], [np.nan, np.nan]])]).to_pandas()
    assert several["loss"].tolist() == [2.0, 4.0]


def test_a_segment_does_not_show_its_arrays():
    assert "array" not in repr(HISTORY[0])


def test_a_history_shows_its_rounds_and_metrics_in_a_short_table():
    assert repr(HISTORY).split("\n") == ["round  test_loss", "    2          1", "    4       0.25"]
    rows = HISTORY._repr_html_().split("<tr>")  # of notebooks
    assert rows[2] == "<td>2</td><td>1</td></tr>"
    several = History([segment(2, [1, 2], [[0.5, 1.0, 2.0], [1.5, 1.0, 4.0]])])
    assert str(several).split("\n")[1].split() == ["2", "1", "to", "3"]
    failed = History([segment(2, [1, 2], [0.5, np.nan])])
    assert str(failed).split("\n")[1].split() == ["2", "nan"]
    assert str(History()) == "()"


def test_a_long_history_is_shown_without_its_middle():
    lines = str(History(segment(k, [1], [0.5, 0.5]) for k in range(1, 1001))).split("\n")
    rounds = [line.split()[0] for line in lines[1:]]
    assert rounds == [*"123456", "…", "995", "996", "997", "998", "999", "1,000"]
