"""The best of a sweep, round by round: means over seeds first, then the best over settings.

An envelope is optimistic: it is chosen by the metric that it shows, and no run's ε covers the
choice.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedjaxsim.extras import importing
from fedjaxsim.metrics import METRICS, judged_by, of_column
from fedjaxsim.report.files import Record
from fedjaxsim.report.labels import Combination

with importing("tables"):
    import pandas as pd
    import pyarrow as pa

Frame = Any
"""A `pandas.DataFrame` or a part of one, which its annotations do not distinguish."""
LAST_COLUMNS = ("epsilon", "epsilon_replace", "delta", "diverged")
"""The columns of results after the metrics."""
_SPENT = LAST_COLUMNS[:3]


def metric_columns(results: pa.Table, settings: Sequence[str]) -> list[str]:
    """Return the columns of the training loss and the evaluation's metrics."""
    other = {"run", "round", "nonfinite", *settings, *LAST_COLUMNS}
    return [name for name in results.column_names if name not in other]


def default_metric(results: pa.Table, settings: Sequence[str]) -> str:
    """Return the test column by which runs are judged.

    Raises:
      ValueError: if the results hold none.
    """
    names = metric_columns(results, settings)
    found = judged_by(names)
    if found is None:
        raise ValueError(f"the results must have a metric among {', '.join(METRICS)}, got {names}")
    return found


def envelope(
    results: pa.Table, settings: Sequence[str], best_over: Sequence[str], metric: str
) -> pd.DataFrame:
    """Compute the best value over some keys, for each combination of the others and each round.

    Args:
      results: results of a sweep, from `table.tidy`.
      settings: columns of all swept keys, `seed` included if swept.
      best_over: keys over which the best is taken; none gives the means over seeds.
      metric: column to judge by.

    Returns:
      Sorted rows, one per combination and round: the other keys, `round`, `metric` (its name),
      `value`, `standard_error` over seeds (NA for one seed), `seeds` (their number), the keys of
      `best_over` (the first best setting), and its `epsilon`, `epsilon_replace` and `delta`. A
      setting is never the best if a seed has diverged or has no finite value; without another,
      value and setting are NA. Columns have the types of Arrow.

    Raises:
      ValueError: if the results lack the metric, or a key of `best_over` is not swept or the seed.
    """
    known = metric_columns(results, settings)
    if metric not in known:
        raise ValueError(f"metric must be one of {', '.join(known)}, got {metric!r}")
    tuned = [name for name in settings if name != "seed"]
    unknown = [name for name in best_over if name not in tuned]
    if unknown:
        raise ValueError(f"best_over takes {', '.join(tuned) or 'nothing'}, got {unknown[0]!r}")
    place = [*(name for name in tuned if name not in best_over), "round"]
    # `delta` may be a swept key itself.
    spent = [name for name in _SPENT if name not in tuned]
    frame = results.to_pandas(types_mapper=pd.ArrowDtype)
    usable = np.isfinite(results[metric].to_numpy()) & ~results["diverged"].to_numpy()
    frame["value"] = frame[metric].where(usable)
    of_seeds = frame.groupby([*place, *best_over], dropna=False)
    means = of_seeds[spent].max()
    means.insert(0, "value", of_seeds["value"].mean())
    counts = of_seeds[["value", *spent]].count()
    means = means.where(counts.eq(of_seeds.size(), axis=0))
    error = of_seeds["value"].std() / np.sqrt(of_seeds.size())
    means["standard_error"] = error.where(means["value"].notna() & (of_seeds.size() > 1))
    means["seeds"] = of_seeds.size().astype("int32[pyarrow]")
    means["metric"] = pd.Series(metric, means.index, pd.ArrowDtype(pa.string()))
    best = best_first(means.reset_index(), metric).drop_duplicates(place)
    best = best.sort_values(place, kind="stable", ignore_index=True)
    best[[*best_over, *spent]] = best[[*best_over, *spent]].where(best["value"].notna())
    return best[[*place, "metric", "value", "standard_error", "seeds", *best_over, *spent]]


def best_first(rows: Frame, metric: str) -> Frame:
    """Sort rows by `value`, the best first; equal rows stay in order."""
    upwards = of_column(metric).larger_is_better
    return rows.sort_values("value", ascending=not upwards, kind="stable")


def keys_of(envelope: Frame) -> list[str]:
    """Return the keys of an envelope, over which no best was taken."""
    return list(envelope.columns[: envelope.columns.get_loc("round")])


def last(envelope: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the final round of each combination of an envelope's keys."""
    keys = keys_of(envelope)
    rows = envelope.sort_values([*keys, "round"], kind="stable")
    return rows.drop_duplicates(keys, keep="last") if keys else rows.tail(1)


def records(frame: Frame) -> list[Record]:
    """Return rows as dictionaries, with None for NA."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def plottable(envelope: pd.DataFrame, given: Sequence[str]) -> Frame:
    """Return the rows of an envelope with the keys `given` for a figure, with NumPy's floats."""
    keys = keys_of(envelope)
    if sorted(keys) != sorted(given):
        raise ValueError(
            f"the keys of the figure must be those of the envelope, {', '.join(keys)}, "
            f"got {', '.join(given)}"
        )
    if envelope.empty:
        raise ValueError("a figure needs at least one row of an envelope, got none")
    return envelope.astype(dict.fromkeys(("value", "standard_error", "epsilon"), float))


def grouped(frame: Frame, keys: Sequence[str]) -> Iterator[tuple[Combination, Frame]]:
    """Yield the rows of each combination of keys in order, unset keys (None) last."""
    if not keys and len(frame):
        yield (), frame
    if not keys or frame.empty:
        return
    for values, rows in frame.groupby(list(keys), dropna=False):
        yield tuple(None if pd.isna(value) else value for value in values), rows
