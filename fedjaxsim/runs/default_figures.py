"""Which figures a sweep gets, and what they show, where nobody has said."""

import itertools
from collections.abc import Sequence

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.extras import importing
from fedjaxsim.report.envelopes import default_metric, envelope, last
from fedjaxsim.report.figures import envelope_figure, heat_figure
from fedjaxsim.report.labels import NOISE, key_label
from fedjaxsim.report.trade_off import trade_off_figure
from fedjaxsim.runs.plan import Plan

with importing("plots"):
    from matplotlib.figure import Figure
with importing("tables"):
    import pandas as pd
    import pyarrow as pa

_MOST_PANELS = 10
_MOST_LINES = 12
_FIRST_LINES = ("algorithm", "personalization", "lam")


def default_figures(plan: Plan, results: pa.Table) -> dict[str, Figure]:
    """The figures that suit the keys of a sweep.

    Panels are levels of noise or, without any, of a key that is no hyperparameter. Lines are the
    other keys, algorithms and levels of personalization first, as long as they are at most twelve;
    over the rest the best is taken.

    Args:
      plan: of the sweep.
      results: its table, not empty.

    Returns:
      By file name: `envelopes.png`; `trade_off.png` where runs differ in ε; `heat.png` where two
      numbers are swept besides it, or one with it, in at most ten panels.
    """
    metric = default_metric(results, plan.columns)
    counts = {key: len(results[key].unique()) for key in plan.columns if key != "seed"}
    varied = [key for key in counts if counts[key] > 1]
    noise = [key for key in varied if key in NOISE and key not in plan.best_over]
    rest = [key for key in varied if key not in noise]
    panels = noise or _panel_keys(plan, rest, counts)
    lines = _line_keys(plan, results, [key for key in rest if key not in panels])

    def best(keys: Sequence[str]) -> pd.DataFrame:
        return envelope(results, plan.columns, [key for key in counts if key not in keys], metric)

    def title(keys: Sequence[str]) -> str:
        over = [key_label(key) for key in varied if key not in keys]
        parts = [_subject(plan), *([f"best over {', '.join(over)}"] if over else [])]
        seeds = len(results["seed"].unique()) if "seed" in plan.columns else 1
        return "; ".join([*parts, *([f"mean of {seeds} seeds"] if seeds > 1 else [])])

    keys = [*panels, *lines]
    figures = {
        "envelopes.png": envelope_figure(
            best(keys),
            panels=panels,
            lines=lines,
            title=title(keys),
            best=best(panels) if lines else None,
        )
    }
    family = [key for key in lines if key not in NOISE]
    if noise and len(last(best(noise))["epsilon"].unique()) > 1:
        keys = [*noise, *family]
        figures["trade_off.png"] = trade_off_figure(
            last(best(keys)), noise=noise, family=family, title=title(keys)
        )
    numbers = [key for key in rest if not pa.types.is_string(results[key].type)]
    numbers.sort(key=lambda key: key not in plan.best_over)
    one_each = len(noise) == len(numbers) == 1
    pairs = itertools.combinations([*noise, *numbers] if one_each else numbers, 2)
    pair = next((pair for pair in pairs if _set_together(results, pair)), ())
    small = [key for key in panels if key not in pair]
    if len(pair) == 2 and _combinations(results, small) <= _MOST_PANELS:
        keys = [*small, *pair]
        figures["heat.png"] = heat_figure(
            last(best(keys)), x=pair[0], y=pair[1], panels=small, title=title(keys)
        )
    return figures


def _panel_keys(plan: Plan, keys: Sequence[str], counts: dict[str, int]) -> list[str]:
    """The first key that no envelope is best over and that needs a program of its own."""
    suited = [
        key
        for key in keys
        if key not in (*plan.hyperparameters, "algorithm", *plan.best_over)
        and counts[key] <= _MOST_PANELS
    ]
    return suited[:1]


def _line_keys(plan: Plan, results: pa.Table, keys: Sequence[str]) -> list[str]:
    """As many keys as make few enough lines, at least one where there is any."""
    order = (*_FIRST_LINES, *keys)
    kept = sorted((key for key in keys if key not in plan.best_over), key=order.index)
    kept = kept or list(keys[:1])
    while len(kept) > 1 and _combinations(results, kept) > _MOST_LINES:
        kept.pop()
    return kept


def _combinations(results: pa.Table, keys: Sequence[str]) -> int:
    return len(results.group_by(list(keys), use_threads=False).aggregate([])) if keys else 1


def _set_together(results: pa.Table, keys: Sequence[str]) -> bool:
    """Whether some run is given a value for each of these keys."""
    return len(results.select(list(keys)).drop_null()) > 0


def _subject(plan: Plan) -> str:
    """What is run, for people: no names of files or folders."""
    names = dict.fromkeys(run.algorithm.rpartition(":")[2] for run in plan.runs)
    titles = [SYSTEMS[name].title if name in SYSTEMS else name for name in names]
    kinds = dict.fromkeys(run.data.partition(":")[::2] for run in plan.runs)
    data = dict.fromkeys(f"{kind} data" if path else kind for kind, path in kinds)
    return f"{', '.join(titles)} on {', '.join(data)}"
