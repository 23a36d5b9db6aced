"""Partitions of one data set among simulated clients.

Each takes flat fields, arrays of shape (N, ...), and a seed, a non-negative integer, and returns a
population of m clients that own every row exactly once. All rows are training rows: `split`
follows.
"""

from collections.abc import Mapping

import numpy as np

from fedjaxsim import checks
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.data.arrays import common_length
from fedjaxsim.data.population import Population

Fields = Mapping[str, np.ndarray]
_BY_LABEL = "The partition was drawn by the labels of all rows and is taken as given."


def iid(fields: Fields, num_clients: int = 100, seed: int = 0) -> Population:
    """Deal random rows to clients, with sizes that differ by at most one.

    Args:
      num_clients: Number m of clients, in [1, N].
    """
    n, rng = _checked(fields, num_clients, seed)
    client = np.empty(n, dtype=np.int64)
    client[rng.permutation(n)] = np.arange(n) % num_clients
    return Population.from_rows(fields, client, num_clients)


def dirichlet(
    fields: Fields,
    num_clients: int = 100,
    alpha: float = 0.5,
    seed: int = 0,
    min_rows: int = 1,
) -> Population:
    """Give each row of a class to client k with probability p_k, p ~ Dirichlet(α, …, α) per class.

    The label-Dirichlet partition of Yurochkin et al., "Bayesian nonparametric federated learning of
    neural networks" (2019): small α makes clients with few classes and unequal sizes. Afterwards
    the smallest client takes a random row from the largest until each has `min_rows`.

    Args:
      num_clients: Number m of clients, at least 1.
      alpha: Concentration, positive: small is heterogeneous.
      min_rows: the least number of rows of a client, at least 1; m · min_rows may not exceed N.
    """
    n, rng = _checked(fields, num_clients, seed, min_rows, alpha)
    _, classes = np.unique(_labels(fields), return_inverse=True)
    client = np.empty(n, dtype=np.int64)
    for c in range(classes.max() + 1):
        members = np.flatnonzero(classes == c)
        probabilities = rng.dirichlet(np.full(num_clients, alpha))
        client[members] = rng.choice(num_clients, size=len(members), p=probabilities)
    _level(client, num_clients, min_rows, rng)
    return Population.from_rows(fields, client, num_clients, public=(_BY_LABEL,))


def pathological(
    fields: Fields,
    num_clients: int = 100,
    shards_per_client: int = 2,
    seed: int = 0,
) -> Population:
    """Sort the rows by label, cut them into equal shards, and deal each client some at random.

    The pathological partition of McMahan et al., "Communication-efficient learning of deep
    networks from decentralized data" (2017): with two shards a client sees about two classes.
    Shards differ in size by at most one row; rows of one class are in random order.

    Args:
      num_clients: Number m of clients, at least 1.
      shards_per_client: Number of shards that a client gets.

    Raises:
      ValueError: num_clients · shards_per_client does not lie in [1, N], or there is no label.
    """
    n, rng = _checked(fields, num_clients, seed)
    checks.count(1, n // num_clients, shards_per_client=shards_per_client)
    shuffled = rng.permutation(n)
    ordered = shuffled[np.argsort(_labels(fields)[shuffled], kind="stable")]
    pieces = np.array_split(ordered, num_clients * shards_per_client)
    client = np.empty(n, dtype=np.int64)
    for position, shard in enumerate(rng.permutation(len(pieces))):
        client[pieces[shard]] = position // shards_per_client
    return Population.from_rows(fields, client, num_clients, public=(_BY_LABEL,))


def quantity(
    fields: Fields,
    num_clients: int = 100,
    alpha: float = 0.5,
    seed: int = 0,
    min_rows: int = 1,
) -> Population:
    """Deal random rows to clients of unequal sizes: shares of all rows ~ Dirichlet(α, …, α).

    The quantity skew of Li, Diao, Chen, He, "Federated learning on non-IID data silos" (2022),
    section 4: clients differ only in their number of rows, more so for small α. As in `dirichlet`,
    the smallest clients take rows from the largest until each has `min_rows`.

    Args:
      num_clients: Number m of clients, at least 1.
      alpha: Concentration, positive: small is heterogeneous.
      min_rows: the least number of rows of a client, at least 1; m · min_rows may not exceed N.
    """
    n, rng = _checked(fields, num_clients, seed, min_rows, alpha)
    stops = np.rint(np.cumsum(rng.dirichlet(np.full(num_clients, alpha)))[:-1] * n).astype(int)
    client = np.empty(n, dtype=np.int64)
    client[rng.permutation(n)] = np.searchsorted(stops, np.arange(n), side="right")
    _level(client, num_clients, min_rows, rng)
    return Population.from_rows(fields, client, num_clients)


def _checked(
    fields: Fields, num_clients: int, seed: int, min_rows: int = 1, alpha: float = 1.0
) -> tuple[int, np.random.Generator]:
    """Check the arguments of a partition; return the number of rows and the random numbers."""
    n = common_length(fields, "data set")
    checks.count(1, n, num_clients=num_clients, min_rows=min_rows)
    if num_clients * min_rows > n:
        raise SettingError(
            Name("num_clients"),
            f" must be at most {n // min_rows}, as each has {min_rows} rows or more of "
            f"the {n}, got {num_clients}",
        )
    checks.positive(alpha=alpha)
    checks.count(0, seed=seed)
    return n, np.random.default_rng(seed)


def _labels(fields: Fields) -> np.ndarray:
    if "y" not in fields:
        raise ValueError(f"there is no field 'y' to divide by, only {sorted(fields)}")
    values = np.asarray(fields["y"])
    if values.size != len(values):
        raise ValueError(f"field 'y' must hold one value per row, got shape {values.shape}")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError("field 'y' must be finite to divide by")
    return values.reshape(-1)


def _level(client: np.ndarray, num_clients: int, min_rows: int, rng: np.random.Generator) -> None:
    """Move random rows from the largest clients until each has `min_rows`; changes `client`."""
    sizes = np.bincount(client, minlength=num_clients)
    if sizes.min() >= min_rows:
        return
    shuffled = rng.permutation(len(client))
    grouped = shuffled[np.argsort(client[shuffled], kind="stable")]
    unmoved = np.cumsum(sizes)  # client k keeps the grouped rows before unmoved[k]
    # As N ≥ m · min_rows, the largest client has more than min_rows while another has fewer: so it
    # never received any, and gives away rows that it had from the start.
    while sizes.min() < min_rows:
        rich, poor = int(sizes.argmax()), int(sizes.argmin())
        unmoved[rich] -= 1
        client[grouped[unmoved[rich]]] = poor
        sizes[rich] -= 1
        sizes[poor] += 1
