"""Clients that are drawn and do not answer, or that do a part of their local steps.

Whoever is drawn is charged. An answer follows from the client, the round and a key of the client's
own, never from data, and the sum is divided by a public number. So a client without an answer is,
for every mechanism and every sampler, a client whose message is zero in that round: ε is at most
that of a run in which all drawn clients answer.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjaxsim import checks, keys
from fedjaxsim.kernels import threefry


class Availability(NamedTuple):
    """The rounds in which clients answer, and the part of their local steps that they do.

    Attributes:
      work: `(key, round, client_id) -> share`, (): the part of its local steps that a drawn client
        does, in [0, 1]; 0 if it does not answer, else at least one step. `key` belongs to this
        client and this round.
      answers: the part of the drawn clients that answers, on average over clients and rounds, in
        (0, 1]; public, since releases are divided by p·m·answers.
      num_clients: m, if it fits one number of clients only; else None.
    """

    work: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    answers: float
    num_clients: int | None = None


def intermittent(
    *,
    dropout: float = 0.1,
    least_work: float = 1.0,
    period: int = 24,
    window: int | None = None,
) -> Availability:
    """Let drawn clients answer in a part of each day, and then with some probability.

    Client k can answer in round t if (t + k) mod `period` < `window`. It then drops out with
    probability `dropout`, independently of everything else. A client that answers does a part of
    its local steps that is uniform in [`least_work`, 1].

    Formal guarantees:
      * The rounds in which a client can answer may be public. Who answers must be as secret as who
        is drawn: an observer of the answers needs full participation (p = 1) in the account.

    Args:
      dropout: Probability that a drawn client does not answer.
      least_work: Smallest part of its local steps that a client does.
      period: Rounds of a day; clients are spread evenly over its time zones.
      window: Rounds of a day in which a client can answer; by default all.

    Raises:
      ValueError: if an argument is out of range.
    """
    window = period if window is None else window
    checks.in_range("[0, 1)", dropout=dropout)
    checks.in_range("(0, 1]", least_work=least_work)
    checks.count(period=period)
    checks.count(1, period, window=window)
    lost = np.uint32(dropout * 2.0**32)

    def work(key, round_, client_id):
        coin, part = threefry.bits(key, (2,))
        awake = (round_ % period + client_id % period) % period < window
        share = least_work + (1 - least_work) * (part * 2.0**-32)
        return jnp.where(awake & (coin >= lost), share, 0.0)

    return Availability(work, (1 - dropout) * window / period)


def recorded(work: ArrayLike) -> Availability:
    """Let drawn clients answer as a trace says.

    Args:
      work: (P, m), the part of its local steps that client k does in the rounds t, t + P, …; 0 if
        it does not answer. Taken as public, and independent of the clients' rows.

    Raises:
      ValueError: if it is no matrix of numbers in [0, 1], or all are 0.
    """
    shares = np.asarray(work, np.float32)
    if shares.ndim != 2 or not np.all((shares >= 0) & (shares <= 1)):
        raise ValueError(
            "a trace must be a matrix, rounds by clients, of numbers in [0, 1], "
            f"got shape {shares.shape}"
        )
    answers = float(np.mean(shares > 0))
    if answers == 0:
        raise ValueError("a trace must have a client that answers, got zeros alone")
    period, num_clients = shares.shape

    def of_round(key, round_, client_id):
        del key
        return jnp.asarray(shares)[round_ % period, client_id]

    return Availability(of_round, answers, num_clients)


def recorded_in(*, trace: str) -> Availability:
    """Let drawn clients answer as a file says; see `recorded`.

    Args:
      trace: Path of a .npy file: rounds by clients, the part of its local steps that each does.
    """
    try:
        return recorded(np.load(trace, allow_pickle=False))
    except (OSError, EOFError) as error:
        raise ValueError(f"trace must be a readable .npy file, got {trace}") from error


def work_of(
    availability: Availability, key: jax.Array, round_: jax.Array, client_id: jax.Array
) -> jax.Array:
    """Return the share of one client, (), from the round's key for clients."""
    own = threefry.fold_in(threefry.fold_in(key, client_id), keys.AVAILABILITY)
    return availability.work(own, round_, client_id)
