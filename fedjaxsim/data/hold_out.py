"""Clients set apart from those that a run uses, to choose hyperparameters on."""

import numpy as np

from fedjaxsim import checks, keys
from fedjaxsim.data.population import Population
from fedjaxsim.data.splitting import check_seed


def hold_out(population: Population, fraction: float, seed: int) -> tuple[Population, Population]:
    """Divide the clients of a population at random into two, independently of their data.

    Returns:
      The clients that are left and those held out, each in the order of the population.
    """
    check_seed(seed)
    checks.in_range("(0, 1)", **{"the fraction of held-out clients": fraction})
    clients = population.num_clients
    count = int(np.floor(fraction * clients + 0.5))
    if count < 2 or clients - count < 2:
        raise ValueError(
            f"at least 2 clients must be held out and 2 be left, but {fraction} of {clients} "
            f"clients are {count}"
        )
    order = np.random.default_rng((seed, keys.HELD_OUT)).permutation(clients)
    left, held_out = np.sort(order[count:]), np.sort(order[:count])
    return population.of_clients(left), population.of_clients(held_out)
