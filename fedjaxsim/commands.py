"""Commands as functions: they return tables, and print nothing but progress.

What needs an extra, such as pyarrow, is imported when a function runs.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from fedjaxsim import store
from fedjaxsim.extras import importing

if TYPE_CHECKING:
    import pandas as pd

    from fedjaxsim.runs.loggers import Factory
    from fedjaxsim.tuning.run import TuningResult

_logger = logging.getLogger("fedjaxsim")


def sweep(
    plan: Path | str | Mapping[str, Any],
    out: Path | str,
    *,
    seeds: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    logger: "str | Factory | Sequence[str | Factory]" = (),
) -> "pd.DataFrame":
    """Run a grid of settings as few programs; `fedjaxsim sweep` as a function.

    Args:
      plan: the file of a sweep, or a dict of a run's settings, in which a list is an axis, as in
        {"data": "digits", "algorithm": ["pmtl", "ditto"], "lam": [0.1, 1.0]}. A list of a setting
        that holds several values, such as `drop`, is one value, and a list of lists an axis.
      out: folder of the results. A sweep that was interrupted, or is finished, goes on there.
      seeds: number of seeds of each setting.
      overwrite: whether to replace the results in the folder.
      quiet: whether no progress is shown.
      logger: names of trackers, or factories `(settings, path) -> write(record, step)`, which get
        each finished run as a separate run, once.

    Returns:
      One row for each run and evaluation: the swept settings, metrics, and ε so far.
    """
    with importing("tables"):
        import pandas as pd
    from fedjaxsim.runs.loggers import find_loggers
    from fedjaxsim.runs.settings_files import settings_in
    from fedjaxsim.runs.sweep_results import RESULTS, read_results
    from fedjaxsim.runs.sweep_runs import read_plan
    from fedjaxsim.runs.sweeping import prepare_sweep

    settings = dict(settings_in(plan, {})) if isinstance(plan, Mapping) else {}
    sweep_plan = read_plan(None if isinstance(plan, Mapping) else Path(plan), settings, seeds)
    how: dict[str, Any] = {"loggers": find_loggers(logger), "overwrite": overwrite, "quiet": quiet}
    prepared = prepare_sweep(sweep_plan, Path(out), **how)
    if prepared.remark:
        _logger.warning(prepared.remark)
    prepared.run(Event())
    return pd.DataFrame(read_results(Path(out) / RESULTS).to_pydict())


def tune(
    settings: Path | str | Mapping[str, Any],
    out: Path | str,
    wrt: Sequence[str],
    *,
    seeds: int = 4,
    steps: int = 20,
    metric: str | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    logger: "str | Factory | Sequence[str | Factory]" = (),
) -> "TuningResult":
    """Tune hyperparameters by descent through whole runs; `fedjaxsim tune` as a function.

    Args:
      settings: the file of a run, or a dict of its settings; tuned ones start there.
      out: folder of the path and the tuned settings. An interrupted tuning goes on there.
      wrt: names of the positive hyperparameters to tune.
      seeds: runs per point, at least 2.
      steps: most points to try besides the start.
      metric: smooth metric to improve; by default loss.
      overwrite: whether to replace the tuning in the folder.
      quiet: whether no progress is shown.
      logger: names of trackers, or factories as `sweep` takes; they get each point that was tried.

    Returns:
      The path: its best point, the settings with it, and their test on fresh seeds.
    """
    from fedjaxsim import checks
    from fedjaxsim.runs.loggers import find_loggers
    from fedjaxsim.runs.settings import flag, run_config, unread_by
    from fedjaxsim.runs.settings_files import read_toml, settings_in
    from fedjaxsim.tuning.run import prepare_tuning

    if isinstance(settings, Mapping):
        config = run_config(**dict(settings_in(settings, {})))
    else:
        config = read_toml(Path(settings))
    for name in config.given().keys() & unread_by("tune"):
        raise ValueError(f"{flag(name)} has no effect on tune")
    checks.count(2, seeds=seeds)
    checks.count(steps=steps)
    asked = {"wrt": tuple(wrt), "seeds": seeds, "steps": steps, "metric": metric}
    how: dict[str, Any] = {"loggers": find_loggers(logger), "overwrite": overwrite, "quiet": quiet}
    tuning = prepare_tuning(config, Path(out), asked, **how)
    return tuning.run(Event())


def compare(
    paths: Iterable[Path | str],
    *,
    metric: str | None = None,
    all_runs: bool = False,
    out: Path | str | None = None,
) -> "pd.DataFrame":
    """Compare finished runs and sweeps by their folders; `fedjaxsim compare` as a function.

    Args:
      paths: the folders.
      metric: name of a metric; by default that by which runs are judged.
      all_runs: whether all runs of a sweep are compared, not only runs with the best learning
        rates, or with the best of what its `best_over` names.
      out: file of the figure (.png, .pdf, .svg), the tables (.tex), the summaries (.csv) or a page
        of all (.html).

    Returns:
      One row for each system, a setting over its seeds: the mean of the metric with half its 95 %
      interval, the difference from the first system on the seeds that both have with p, and the
      largest ε.
    """
    with importing("tables"):
        import pandas as pd
    from fedjaxsim.runs.comparison import check_out
    from fedjaxsim.runs.comparison import compare as read

    if out is not None:
        check_out(Path(out))
    comparison = read(map(Path, paths), metric, all_runs=all_runs)
    if out is not None:
        store.write(Path(out), comparison.content(Path(out)))
    return pd.DataFrame(comparison.compared())
