"""Commands as functions: they return tables, and print nothing but progress.

What needs an extra, such as pyarrow, is imported when a function runs.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from fedjaxsim.extras import importing

if TYPE_CHECKING:
    import pandas as pd

_logger = logging.getLogger("fedjaxsim")


def sweep(
    plan: Path | str | Mapping[str, Any],
    out: Path | str,
    *,
    seeds: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> "pd.DataFrame":
    """Run a grid of settings as few programs; `fedjaxsim sweep` as a function.

    Args:
      plan: the file of a sweep, or settings of a run by name, in which a list is an axis, as in
        {"data": "digits", "algorithm": ["pmtl", "ditto"], "lam": [0.1, 1.0]}.
      out: folder of the results. A sweep that was interrupted, or is finished, goes on there.
      seeds: number of seeds of each setting.
      overwrite: whether to replace the results in the folder.
      quiet: whether no progress is shown.

    Returns:
      One row for each run and evaluation: the swept settings, metrics, and ε so far.
    """
    with importing("tables"):
        import pandas as pd
    from fedjaxsim.runs.sweep_results import RESULTS, read_results
    from fedjaxsim.runs.sweep_runs import read_plan
    from fedjaxsim.runs.sweeping import prepare_sweep

    settings = plan if isinstance(plan, Mapping) else {}
    found = read_plan(None if isinstance(plan, Mapping) else Path(plan), settings, seeds)
    prepared = prepare_sweep(found, Path(out), overwrite=overwrite, quiet=quiet)
    if prepared.remark:
        _logger.warning(prepared.remark)
    prepared.run(Event())
    return pd.DataFrame(read_results(Path(out) / RESULTS).to_pydict())
