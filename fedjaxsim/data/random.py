"""Random rows with random labels: for measurements, which depend on shapes and sizes alone."""

from collections.abc import Sequence

import numpy as np

from fedjaxsim.data.population import Population
from fedjaxsim.data.splitting import check_seed


def random_rows(
    num_clients: int = 100,
    shape: Sequence[int] = (784,),
    rows: Sequence[int] = (20,),
    labels: int = 10,
    tokens: int = 0,
    seed: int = 0,
) -> Population:
    """Draw standard normal features, or tokens, with labels that do not depend on them.

    Args:
      num_clients: Number of clients.
      shape: Shape of one example, as 784 or 28,28.
      rows: Rows of a client, or the least and the most, as 5,69; most clients have few.
      labels: Number of different labels.
      tokens: Number of different tokens; an example is then a row of tokens, each with a label.
        0 for real numbers.
      seed: a non-negative integer.

    Returns:
      All rows for training: x (N, ...) float32 and y (N,) int32, or x (N, L) and y (N, L) int32.
    """
    check_seed(seed)
    for name, sizes, least in (
        ("clients", [num_clients], 1), ("shape", shape, 1), ("rows", rows, 1),
        ("labels", [labels], 2), ("tokens", [tokens], 0),
    ):  # fmt: skip
        if not sizes or min(sizes) < least:
            raise ValueError(f"{name} must be at least {least}, got {', '.join(map(str, sizes))}")
    if len(rows) > 2 or rows[0] > rows[-1]:
        raise ValueError(f"rows must be one number, or the least and the most, got {list(rows)}")
    rng = np.random.default_rng(seed)
    counts = np.full(num_clients, rows[0])
    if len(rows) == 2:
        shares = (np.arange(num_clients) + 0.5) / num_clients
        counts += rng.permutation(np.floor((rows[1] - rows[0] + 1) * shares**1.5).astype(int))
    total = int(counts.sum())
    if tokens:
        x = rng.integers(0, tokens, (total, *shape), dtype=np.int32)
        y = rng.integers(0, labels, (total, *shape), dtype=np.int32)
    else:
        x = rng.standard_normal((total, *shape), dtype=np.float32)
        y = rng.integers(0, labels, total, dtype=np.int32)
    return Population.from_flat({"x": x, "y": y}, counts)
