"""Divergence of a run, from its records."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from fedjaxsim.report.files import Record

_GROWTH = 10


def diverged(records: Sequence[Record]) -> Iterator[bool]:
    """Yield for each evaluation of a run whether it has diverged.

    A run has diverged from the evaluation on at which its training loss, or a test metric that was
    finite at first, is not finite; and while its training loss is more than ten times its first
    one. A run that noise carries away from a good start is worse, and not diverging.

    Args:
      records: records of one run, from its first evaluation on.
    """

    def finite(value: Any) -> bool:
        return value is None or math.isfinite(value)

    # A metric that has no value from the start (no client has test rows) says nothing.
    metrics = {name for record in records for name in record if name.startswith("test_")}
    watched = ["train_loss", *(name for name in metrics if finite(records[0].get(name)))]
    first, broken, growing = None, False, False
    for record in records:
        loss = record.get("train_loss")
        broken |= not all(finite(record.get(name)) for name in watched)
        if loss is not None and not broken:
            first = loss if first is None else first
            growing = loss > _GROWTH * first
        yield broken or growing


def diverging_from(records: Sequence[Record]) -> int | None:
    """Return the first round of the divergence in which a run ends; None if it does not diverge.

    Args:
      records: as for `diverged`, with `round`.
    """
    start = None
    for record, broken in zip(records, diverged(records), strict=True):
        start = (record["round"] if start is None else start) if broken else None
    return start
