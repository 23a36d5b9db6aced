import pytest
import scipy.stats

from fedjaxsim.privacy.entries import excess, least_count

CASES = [(n, p) for n in (1, 7, 1000, 10**7) for p in (2.0**-32, 0.003, 0.5, 0.97, 1.0)]


@pytest.mark.parametrize(("n", "p"), CASES)
def test_tails_are_those_of_scipy(n, p):
    for tail in (1e-15, 1e-6, 0.1):
        k = least_count(tail, n, p)
        assert excess(k, n, p) <= tail
        assert k == 0 or excess(k - 1, n, p) > tail
        for count in {k, k // 2, max(0, k - 1)}:
            expected = scipy.stats.binom.sf(count, n, p)
            assert excess(count, n, p) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_of_two_coins():
    assert excess(0, 2, 0.5) == pytest.approx(0.75, rel=1e-15)
    assert excess(1, 2, 0.5) == pytest.approx(0.25, rel=1e-15)
    assert excess(2, 2, 0.5) == 0
    assert [least_count(tail, 2, 0.5) for tail in (0.8, 0.3, 0.2)] == [0, 1, 2]
