"""HTML for notebooks."""

import numpy as np

from fedjaxsim import notebook


def test_text_is_escaped():
    page = notebook.table("a < b", ["<x>"], [["1 & 2"]]) + notebook.details("<s>", ["p > 0"])
    for text in ("a &lt; b", "&lt;x&gt;", "1 &amp; 2", "&lt;s&gt;", "p &gt; 0"):
        assert text in page


def test_numbers_are_short_and_arrays_are_ranges():
    assert notebook.number(0.123456) == "0.1235"
    assert notebook.number(np.array([3.0, 1.0])) == "1 to 3"
    assert notebook.number(np.nan) == "nan"
