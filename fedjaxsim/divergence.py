"""Runs that diverge: how they are known.

JAX is not imported: comparing finished runs needs none.
"""

import math
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any

Record = dict[str, Any]
"""Names and values, such as those in an evaluation or in a file of JSON."""
DIVERGES = (
    "this run diverges from round {} on (training loss above ten times its first value, or not "
    "finite): a smaller learning rate or λ may help, or features of one scale (--range; "
    "fjs.data.scale)"
)
NOT_FINITE = (
    "{} messages of clients were not finite and counted as zero: a smaller learning rate may help; "
    "the evaluations in which they occurred count them"
)
"""The warnings, of a round and of a number of messages."""
_MOST_WORSE = 6
"""Most runs that are named as worse than a constant."""
MORE_STEPS = "try more --rounds, another --learning-rate, or ranges of columns (--range)"
LESS_NOISE = (
    "with noise, try a smaller --clip{}, a larger --sampling-rate or --epsilon, or "
    "--algorithm local, which sends nothing"
)
"""What to try if models are worse than one constant."""
_GROWTH = 10
"""Growth of the training loss from which on a run diverges."""


class DivergingWarning(UserWarning):
    """Warning of a run that diverges."""


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, Real) and math.isfinite(value)


def failures(rows: Sequence[Record]) -> Iterator[bool]:
    """Yield for each evaluation of a run, from its first one on, whether the run has failed.

    It has from the evaluation on at which its training loss, or a test metric that was finite at
    first, is not finite; no training loss (None) says nothing.
    """
    # A metric that has no value from the start (no client has test rows) says nothing.
    names = {name for row in rows for name in row if name.startswith("test_")}
    watched = [name for name in names if is_finite(rows[0].get(name))]
    failed = False
    for row in rows:
        loss = row.get("train_loss")
        failed |= not (loss is None or math.isfinite(loss))
        failed |= not all(is_finite(row.get(name)) for name in watched)
        yield failed


def diverging_from(rows: Sequence[Record]) -> int | None:
    """Return the round from which on a run diverges up to its end; None if it does not.

    It does while it has failed, or its training loss is more than ten times its first one. A run
    that noise carries away from a good start is worse, and does not diverge.
    """
    losses = (row.get("train_loss") for row in rows)
    first = next((loss for loss in losses if loss is not None), math.inf)
    start = None
    for row, failed in zip(rows, failures(rows), strict=True):
        loss = row.get("train_loss")
        if loss is None and not failed:
            continue  # nobody took part
        most = first + (_GROWTH - 1) * abs(first)  # a loss of one's own may be negative
        bad = failed or (loss is not None and loss > most)
        start = (row["round"] if start is None else start) if bad else None
    return start


def warning_in(course: Sequence[Record], nonfinite: int, noised: bool) -> str:
    """Return the warnings of a finished run, if any; noise may carry it to finite losses."""
    sentences = [NOT_FINITE.format(nonfinite)] if nonfinite else []
    start = diverging_from(course)
    if start is not None and not (noised and is_finite(course[-1]["train_loss"])):
        sentences.append(DIVERGES.format(start))
    return "; ".join(sentences)


def list_worse(worse: Sequence[str], remedies: Sequence[str] = ()) -> str:
    """Return a sentence on runs that are worse than a constant, "name: how" each; "" for none."""
    if not worse:
        return ""
    more = [f"and {len(worse) - _MOST_WORSE} more"] if len(worse) > _MOST_WORSE else []
    listed = "; ".join([*worse[:_MOST_WORSE], *more, *remedies])
    return f"warning: of no use yet are the models of {listed}"
