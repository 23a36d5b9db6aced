"""Sentences on runs that are worse than one constant, and what to try."""

from collections.abc import Sequence

_MOST_WORSE = 6
"""Most runs that are named as worse than a constant."""
MORE_STEPS = "try more --rounds, another --learning-rate, or ranges of columns (--range)"
LESS_NOISE = (
    "with noise, try a smaller --clip{}, a larger --sampling-rate or --epsilon, or "
    "--algorithm local, which sends nothing"
)


def list_worse(worse: Sequence[str], remedies: Sequence[str] = ()) -> str:
    """Return a sentence on runs that are worse than a constant, "name: how" each; "" for none."""
    if not worse:
        return ""
    more = [f"and {len(worse) - _MOST_WORSE} more"] if len(worse) > _MOST_WORSE else []
    listed = "; ".join([*worse[:_MOST_WORSE], *more, *remedies])
    return f"warning: of no use yet are the models of {listed}"
