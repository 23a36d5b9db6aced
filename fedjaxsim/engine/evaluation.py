"""Evaluation: per-client metrics of the models the clients really predict with.

Nothing here is private: metrics are averages over private data, for the researcher who owns the
simulation. They never reach the training state.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjaxsim.metrics import metric

PERCENTILES = (10, 50, 90)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Per-client metrics on one split, and how they are summarized.

    Of S runs at once, values are (m, S), and every summary is (S,).

    Attributes:
      split: "train", "validation" or "test".
      count: (m,) int, each client's rows in the split.
      values: by name, (m,) float64: the mean over the client's rows; NaN for a client without any.
    """

    split: str
    count: np.ndarray
    values: Mapping[str, np.ndarray]

    def mean(self, name: str) -> Any:
        """The unweighted mean over clients that have rows."""
        return np.mean(self._present(name), axis=0)

    def weighted_mean(self, name: str) -> Any:
        """The mean over examples: clients weighted by their rows; of nMSE, the pooled one."""
        return np.average(self._present(name), weights=self.count[self.count > 0], axis=0)

    def percentiles(self, name: str) -> np.ndarray:
        """The 10th, 50th and 90th percentile over clients that have rows, (3,)."""
        # Between infinities there is nothing to interpolate: NaN, without a warning.
        with np.errstate(invalid="ignore"):
            return np.percentile(self._present(name), PERCENTILES, axis=0)

    def summary(self) -> dict[str, Any]:
        """All metrics as flat numbers, prefixed by the split: `test_accuracy`, `test_accuracy_p10`.

        The plain name is the unweighted mean over clients, `_weighted` the mean over examples,
        `_p10`, `_p50`, `_p90` percentiles over clients. nMSE is the exception the field makes: the
        plain `nmse` is pooled (total squared error over the variance of all targets) and
        `nmse_unweighted` the mean over clients. NaN throughout if no client has rows.
        """
        result = {}
        for name in self.values:
            key = f"{self.split}_{name}"
            if not np.any(self.count > 0):
                result[key] = np.full(self.values[name].shape[1:], np.nan)[()]
                continue
            if metric(name).pooled:
                result[key] = self.weighted_mean(name)
                result[f"{key}_unweighted"] = self.mean(name)
            else:
                result[key] = self.mean(name)
                result[f"{key}_weighted"] = self.weighted_mean(name)
            for q, value in zip(PERCENTILES, self.percentiles(name), strict=True):
                result[f"{key}_p{q}"] = value
        return result

    def _present(self, name: str) -> np.ndarray:
        return self.values[name][self.count > 0]


def summarize(
    split: str,
    sums: Mapping[str, np.ndarray],
    count: np.ndarray,
    targets: np.ndarray | None,
) -> Evaluation:
    """Turns sums over rows into an `Evaluation`.

    Args:
      split: its name.
      sums: by metric name, (m,) or, of S runs, (m, S): the sum over each client's rows.
      count: (m,) rows.
      targets: (n,) all targets of the split; "squared_error" divided by their variance is reported
        as "nmse" (as in MP-MTL's experiments). None where there are none.
    """
    divisor = np.where(count > 0, count, np.nan)
    values = {name: (np.asarray(total, np.float64).T / divisor).T for name, total in sums.items()}
    if "squared_error" in values and targets is not None and len(targets):
        variance = float(np.var(np.asarray(targets, np.float64)))
        if variance > 0:
            values["nmse"] = values["squared_error"] / variance
    return Evaluation(split, count, values)
