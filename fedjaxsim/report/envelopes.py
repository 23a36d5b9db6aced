"""The best of a sweep, round by round: means over seeds first, then the best over settings.

An envelope shows what each system can do when it is tuned, and says with which setting. It is
chosen on the very metrics that it shows, so it is optimistic, and no run's ε covers the choice.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedjaxsim.metrics import METRICS, judged_by, of_column

LAST_COLUMNS = ("epsilon", "epsilon_replace", "delta", "diverged")
"""The columns of results after the metrics."""

_SEED = "seed"
_SPENT = ("epsilon", "epsilon_replace", "delta")
_STRICT = pc.ScalarAggregateOptions(skip_nulls=False)


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
) -> pa.Table:
    """The best value over some swept keys, for each combination of the others and each round.

    Args:
      results: as `rows.tidy` makes them.
      settings: the columns of all swept keys, `seed` among them where it is swept.
      best_over: those over which the best is taken; none gives the means over seeds.
      metric: the column to judge by.

    Returns:
      One row per combination and round, in their order: the columns of the other keys, `round`,
      `metric` (its name), `value`, `standard_error` over seeds (null for a single one), `seeds`
      (their number), the columns of `best_over` (the setting that was best; on ties the first in
      order), and `epsilon`, `epsilon_replace` and `delta` of that setting. A setting of which some
      seed has diverged, or has no finite value, is never the best; where there is no other, value
      and setting are null.

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
    means = _over_seeds(results, [*place, *best_over], spent, metric)
    descending = {"value"} if of_column(metric).larger_is_better else set()
    ranked = _sorted(means, [*place, "value", *best_over], descending)
    first = _first_of_each(ranked, place)
    usable = first["value"].is_valid()
    columns = {name: first[name] for name in place}
    columns["metric"] = pa.array([metric] * len(first), pa.string())
    columns |= {name: first[name] for name in ("value", "standard_error", "seeds")}
    for name in [*best_over, *spent]:
        nothing = pa.scalar(None, first[name].type)
        columns[name] = pc.call_function("if_else", [usable, first[name], nothing])
    return pa.table(columns)


def last(envelope: pa.Table) -> pa.Table:
    """The rows of an envelope at the final round of each combination of its other keys.

    Args:
      envelope: from `envelope`.
    """
    combination = envelope.column_names[: envelope.column_names.index("round")]
    return _first_of_each(_sorted(envelope, [*combination, "round"], {"round"}), combination)


def _over_seeds(
    results: pa.Table, keys: Sequence[str], spent: Sequence[str], metric: str
) -> pa.Table:
    """Mean and standard error of each setting, null where any of its seeds is unusable."""
    values = results[metric].to_numpy()
    usable = np.isfinite(values) & ~results["diverged"].to_numpy()
    table = results.select([*keys, *spent]).append_column("value", pa.array(values, mask=~usable))
    grouped = table.group_by(list(keys), use_threads=False).aggregate(
        [
            ("value", "mean", _STRICT),
            ("value", "stddev", pc.VarianceOptions(ddof=1, skip_nulls=False)),
            ("value", "count", pc.CountOptions(mode="all")),
            *((name, "max", _STRICT) for name in spent),
        ]
    )
    seeds = grouped["value_count"]
    deviation = grouped["value_stddev"].to_numpy()
    error = np.divide(deviation, np.sqrt(seeds.to_numpy()))
    return pa.table(
        {
            **{name: grouped[name] for name in keys},
            "value": grouped["value_mean"],
            "standard_error": pa.array(error, mask=~np.isfinite(error)),
            "seeds": seeds.cast(pa.int32()),
            **{name: grouped[f"{name}_max"] for name in spent},
        }
    )


def _sorted(table: pa.Table, columns: Sequence[str], descending: set[str]) -> pa.Table:
    """The rows in order of these columns; nulls come last either way."""
    return table.sort_by(
        [(name, "descending" if name in descending else "ascending") for name in columns]
    )


def _first_of_each(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The first row of each combination of the keys, in the order of the table."""
    if not keys:
        return table.slice(0, 1)
    numbered = table.select(keys).append_column("row", pa.array(np.arange(len(table))))
    first = numbered.group_by(list(keys), use_threads=False).aggregate([("row", "min")])
    return table.take(pa.array(np.sort(first["row_min"].to_numpy())))
