"""Parameters by path."""

from typing import Any

import jax
import pytest

from fedjaxsim.algorithms.layers import merge, split


def test_parameters_split_by_path_and_merge_again():
    params = {"a": {"x": 1.0, "y": [2.0, 3.0]}, "ab": 4.0}
    assert split(params, "a") == (
        {"a": {"x": 1.0, "y": [2.0, 3.0]}, "ab": None},
        {"a": {"x": None, "y": [None, None]}, "ab": 4.0},
    )
    for selection, selected in [
        (None, [1, 2, 3, 4]),
        ("ab", [4]),
        ("a", [1, 2, 3]),  # and not "ab", which only begins with the same letter
        ("a/y", [2, 3]),
        (["a/y/1", "ab"], [3, 4]),
        (("a", "a/x"), [1, 2, 3]),
        (lambda path: path in ("a/x", "a/y/1"), [1, 3]),
    ]:
        part, rest = split(params, selection)
        assert jax.tree.leaves(part) == selected
        assert len(jax.tree.leaves(rest)) == 4 - len(selected)
        assert merge(part, rest) == merge(rest, part) == params
    with pytest.raises(ValueError, match=r"'x'.*'a/x', 'a/y/0', 'a/y/1', 'ab'"):
        split(params, "x")
    with pytest.raises(ValueError, match="'a/z'"):
        split(params, ["a/x", "a/z"])
    with pytest.raises(ValueError, match="predicate"):
        split(params, lambda path: path == "a")
    refused: list[Any] = [[], 3, ["a", 3]]
    for wrong in refused:
        with pytest.raises(ValueError, match="name"):
            split(params, wrong)
