"""Rows that are overlapping windows of a series, such as text, and so share raw data."""

import numpy as np

from fedjaxsim.data.arrays import Ranges
from fedjaxsim.data.population import Population

_CLIENTS, _PAIRS, _ROWS = 50, 20, 5000
"""Clients that are looked at, pairs of neighbouring rows of each, and rows of each split."""
_DISTINCT = 4
"""Least number of different values in half a window: shorter patterns repeat by chance."""
_SHORTEST = 8


def window_step(population: Population) -> int | None:
    """Return the number of positions by which a client's next training row continues the last one.

    Rows are windows if most neighbours overlap: x[i + 1, :−s] = x[i, s:] for a step s, in values
    enough not to be equal by chance, as one-hot columns of a table are. None if they are not.
    """
    x, ranges = population.fields.get("x"), population.splits["train"]
    clients = np.flatnonzero(ranges.count > 1)[:_CLIENTS]
    if x is None or not _may_be_windows(x) or not len(clients):
        return None
    first = np.concatenate([_first(ranges, k, _PAIRS + 1)[:-1] for k in clients])
    before, after = _read(x, first), _read(x, first + 1)
    for step in range(1, x.shape[1] - 1):
        overlap = before[:, step:]
        same = (overlap == after[:, :-step]).all(axis=(1, 2))
        if np.mean(same & _varied(overlap)) > 0.5:
            return step
    return None


def rows_between(population: Population, step: int) -> int:
    """Return how many rows lie between windows that share nothing, nor the label behind each."""
    return -(-(population.fields["x"].shape[1] + 1) // step) - 1


def shared_windows(population: Population) -> float | None:
    """Return the share of test rows that have half a window in common with a training row.

    Rows of one client are compared, at unequal places in their windows, of some clients if there
    are many. None if x is no series or there are no test rows.
    """
    x, train, test = population.fields.get("x"), *map(population.splits.get, ("train", "test"))
    assert train is not None
    assert test is not None
    looked = np.flatnonzero((train.count > 0) & (test.count > 0))[:_CLIENTS]
    if x is None or not _may_be_windows(x) or not len(looked):
        return None
    shares = []
    for k in looked:
        train_windows, asked = (
            np.lib.stride_tricks.sliding_window_view(
                _read(x, _first(rows, k, _ROWS)), x.shape[1] // 2, 1
            )
            for rows in (train, test)
        )
        heads, tails = asked[:, 0], asked[:, -1]
        shares.append(
            (np.isin(_values(heads), _values(train_windows[:, 1:])) & _varied(heads))
            | (np.isin(_values(tails), _values(train_windows[:, :-1])) & _varied(tails))
        )
    return float(np.mean(np.concatenate(shares)))


def _may_be_windows(x: np.ndarray) -> bool:
    """Return whether x has rows of a series, (N, L) or (N, L, c)."""
    return x.ndim in (2, 3) and x.shape[1] >= _SHORTEST


def _first(ranges: Ranges, client: int, most: int) -> np.ndarray:
    """Return the first rows of a client, up to a limit."""
    start, count = int(ranges.start[client]), int(ranges.count[client])
    return np.arange(start, start + min(count, most))


def _read(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return rows as (n, L, c)."""
    windows = np.asarray(x[rows])
    return windows.reshape(*windows.shape[:2], -1)


def _values(pieces: np.ndarray) -> np.ndarray:
    """Return pieces of windows, (…, c, h), each as one value made of its bytes."""
    flat = np.ascontiguousarray(pieces).reshape(-1, pieces.shape[-2] * pieces.shape[-1])
    return flat.view(np.dtype((np.void, flat.dtype.itemsize * flat.shape[1]))).ravel()


def _varied(pieces: np.ndarray) -> np.ndarray:
    """Return whether each piece, (n, …), has enough different values not to occur by chance."""
    ordered = np.sort(pieces.reshape(len(pieces), -1), axis=1)
    return 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1) >= _DISTINCT
