"""The best of a sweep, round by round: means over seeds first, then the best over settings.

An envelope shows what each system can do when it is tuned, and says with which setting. It is
chosen on the very metrics that it shows, so it is optimistic, and no run's ε covers the choice.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjaxsim.extras import importing
from fedjaxsim.metrics import METRICS, judged_by, of_column
from fedjaxsim.report.files import Record

with importing("tables"):
    import pandas as pd
    import pyarrow as pa

Frame = Any
"""A `pandas.DataFrame` or a part of one: its annotations do not tell type checkers which."""
LAST_COLUMNS = ("epsilon", "epsilon_replace", "delta", "diverged")
"""The columns of results after the metrics."""

_SEED = "seed"
_SPENT = ("epsilon", "epsilon_replace", "delta")


def metrics(results: pa.Table, settings: Sequence[str]) -> list[str]:
    """The columns that measure runs: the training loss and the evaluation's metrics.

    Args:
      results: as `rows.tidy` makes them.
      settings: the columns of the swept keys.
    """
    other = {"run", "round", *settings, *LAST_COLUMNS}
    return [name for name in results.column_names if name not in other]


def default_metric(results: pa.Table, settings: Sequence[str]) -> str:
    """The metric on test rows by which runs are judged, see `METRICS`.

    Raises:
      ValueError: if the results hold none.
    """
    names = metrics(results, settings)
    found = judged_by(names)
    if found is None:
        raise ValueError(f"the results must have a metric among {', '.join(METRICS)}, got {names}")
    return found


def envelope(
    results: pa.Table, settings: Sequence[str], best_over: Sequence[str], metric: str
) -> pd.DataFrame:
    """The best value over some swept keys, for each combination of the others and each round.

    Args:
      results: as `rows.tidy` makes them.
      settings: the columns of all swept keys, `seed` among them where it is swept.
      best_over: those over which the best is taken; none gives the means over seeds.
      metric: the column to judge by.

    Returns:
      One row per combination and round, in their order: the columns of the other keys, `round`,
      `metric` (its name), `value`, `standard_error` over seeds (NA for a single one), `seeds`
      (their number), the columns of `best_over` (the setting that was best; on ties the first in
      order), and `epsilon`, `epsilon_replace` and `delta` of that setting. A setting of which some
      seed has diverged, or has no finite value, is never the best; where there is no other, value
      and setting are NA. Columns have the types of Arrow.

    Raises:
      ValueError: for a metric that the results lack, a key to be best over that is not swept or is
        the seed.
    """
    known = metrics(results, settings)
    if metric not in known:
        raise ValueError(f"metric must be one of {', '.join(known)}, got {metric!r}")
    tuned = [name for name in settings if name != _SEED]
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
    # Sorting is stable, and the settings are in order.
    ranked = means.reset_index().sort_values(
        "value", ascending=not of_column(metric).larger_is_better, kind="stable"
    )
    best = ranked.drop_duplicates(place).sort_values(place, kind="stable", ignore_index=True)
    best[[*best_over, *spent]] = best[[*best_over, *spent]].where(best["value"].notna())
    return best[[*place, "metric", "value", "standard_error", "seeds", *best_over, *spent]]


def last(envelope: pd.DataFrame) -> pd.DataFrame:
    """The rows of an envelope at the final round of each combination of its other keys.

    Args:
      envelope: from `envelope`.
    """
    keys = list(envelope.columns[: envelope.columns.get_loc("round")])
    rows = envelope.sort_values([*keys, "round"], kind="stable")
    return rows.drop_duplicates(keys, keep="last") if keys else rows.tail(1)


def records(frame: Frame) -> list[Record]:
    """The rows as dictionaries, with None for what is NA."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")
