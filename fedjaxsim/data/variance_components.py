"""Variance components of a linear regression with random intercepts and slopes, by moments."""

import numpy as np

from fedjaxsim.data.population import Population

_MOST = 1e4
"""The ratio that stands for a component of variance 0."""


def variance_ratios(population: Population) -> dict[str, float]:
    """Estimate σ²/τ² of clients' slopes and intercepts from training rows, without noise.

    In y = x·(β + b_k) + β₀ + a_k + e, the slopes b_k have variance τ² each, the intercepts a_k
    variance τ₀², and e variance σ². Products of two residuals of one client estimate them (Rao
    1970, with residuals of the pooled fit): their mean is τ₀² + τ² x_i·x_j. With these as
    `hparams.lam` and `hparams.lam_intercept`, clients of `ditto` and `pmtl` with `pull="rows"`
    shrink towards w as in a mixed model. They are computed from all clients' rows, which no ε
    covers.

    Returns:
      "lam", σ²/τ², and "lam_intercept", σ²/τ₀²; 10⁴ at most, where the estimated variance is 0.

    Raises:
      ValueError: rows are not x (N, d) and y (N,), or no client has two training rows.
    """
    x, y = population.fields.get("x"), population.fields.get("y")
    ranges = population.splits["train"]
    if x is None or y is None or x.ndim != 2 or y.ndim != 1 or "y" in population.categories:
        raise ValueError("only regressions of numbers y (N,) on x (N, d) have variance ratios")
    if not np.any(ranges.count > 1):
        raise ValueError("variance ratios need clients with two training rows or more")
    rows = ranges.all_rows()
    x, y = x[rows].astype(np.float64), y[rows].astype(np.float64)
    design = np.column_stack([np.ones(len(x)), x])
    residual = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    owner = np.repeat(np.arange(len(ranges.count)), ranges.count)
    count = ranges.count.astype(np.float64)
    norms = np.sum(x**2, axis=1)
    sums = _by_client(owner, x, len(count))
    grams = sum(
        np.sum(_by_client(owner, x * x[:, [column]], len(count)) ** 2)
        for column in range(x.shape[1])
    )
    # Sums over ordered pairs of two rows of one client, of 1, x_i·x_j and its square.
    ones = np.sum(count**2 - count)
    inner, squares = np.sum(sums**2) - np.sum(norms), grams - np.sum(norms**2)
    of_residuals = np.sum(_by_client(owner, residual[:, None], len(count)) ** 2)
    of_slopes = np.sum(_by_client(owner, x * residual[:, None], len(count)) ** 2)
    first = of_residuals - np.sum(residual**2)
    second = of_slopes - np.sum(residual**2 * norms)
    both = np.linalg.lstsq(np.array([[ones, inner], [inner, squares]]), [first, second], rcond=None)
    intercepts, slopes = both[0]
    if slopes <= 0 or intercepts <= 0:  # at the border one component is left
        slopes, intercepts = (0.0, first / ones) if slopes <= 0 else (second / squares, 0.0)
    intercepts, slopes = max(0.0, intercepts), max(0.0, slopes)
    noise = max(0.0, np.mean(residual**2) - intercepts - slopes * np.mean(norms))
    return {
        name: float(_MOST if variance * _MOST <= noise else noise / variance)
        for name, variance in (("lam", slopes), ("lam_intercept", intercepts))
    }


def _by_client(owner: np.ndarray, values: np.ndarray, clients: int) -> np.ndarray:
    """Return sums of values (n, d) over the rows of each client, (m, d)."""
    return np.stack([np.bincount(owner, column, clients) for column in values.T], axis=1)
