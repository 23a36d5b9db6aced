from fedjaxsim.bench.results import spread


def test_a_spread_is_a_median_with_its_range():
    assert spread([4.0, 1.0, 10.0]) == (4.0, 1.0, 10.0)
    assert spread([1.0, 2.0]).median == 1.5
    assert spread([3.0]) == (3.0, 3.0, 3.0)


def test_a_ratio_ranges_over_all_pairs_of_processes():
    new, old = [3.0, 4.0, 8.0], [1.0, 2.0, 5.0]
    pairs = [a / b for a in new for b in old]
    found = spread(new).over(spread(old))
    assert found == (4.0 / 2.0, min(pairs), max(pairs))
