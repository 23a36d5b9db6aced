import pytest

from fedjaxsim.bench.spread import Spread, differs, ratio, spread


def test_a_spread_is_a_median_with_its_range():
    assert spread([4.0, 1.0, 10.0]) == (4.0, 1.0, 10.0)
    assert spread([1.0, 2.0]).median == 1.5
    assert spread([3.0]) == (3.0, 3.0, 3.0)


def test_a_ratio_ranges_over_all_pairs_of_processes():
    new, old = [3.0, 4.0, 8.0], [1.0, 2.0, 5.0]
    pairs = [a / b for a in new for b in old]
    found = ratio(spread(new), spread(old))
    assert found == (4.0 / 2.0, min(pairs), max(pairs))


@pytest.mark.parametrize(
    ("new", "old", "sign"),
    [([3, 4], [1, 2], 1), ([1, 2], [3, 4], -1), ([1, 3], [2, 4], 0), ([1, 2], [2, 3], 0)],
)
def test_only_processes_that_all_lie_apart_differ(new, old, sign):
    assert differs(ratio(spread(new), spread(old))) == sign


def test_a_ratio_of_one_is_no_difference():
    assert differs(Spread(1.0, 1.0, 1.0)) == 0
