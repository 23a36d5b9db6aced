"""Readers of data without a file: digits that come with the package, and synthetic problems."""

import functools
from collections.abc import Callable
from typing import Any

from fedjaxsim.data import synthetic
from fedjaxsim.data.population import Population
from fedjaxsim.data.source import Source
from fedjaxsim.data.tables import handwritten_digits


def read_digits() -> Source:
    """Read the 1,797 images of 8x8 pixels, which have no clients."""
    return Source(handwritten_digits.digits())


def _reader(factory: Callable[..., Any]) -> Callable[..., Source]:
    """Return the reader of a factory of a population, which may return its truth with it."""

    @functools.wraps(factory)
    def read(**settings: Any) -> Source:
        made = factory(**settings)
        return Source.of(made if isinstance(made, Population) else made[0])

    return read


random_rows = _reader(synthetic.random_rows)
synthetic_regression = _reader(synthetic.synthetic_regression)
low_rank_regression = _reader(synthetic.low_rank_regression)
group_sparse_regression = _reader(synthetic.group_sparse_regression)
regression_stream = _reader(synthetic.regression_stream)
