"""The accounts of a run: what its releases cost clients and, if clients add noise, examples."""

from collections.abc import Callable, Sequence
from typing import Any

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.events import EXAMPLE, PrivacyEvent, SamplingScheme
from fedjaxsim.privacy.ledger import Charges, Ledger
from fedjaxsim.privacy.mechanisms import Mechanism
from fedjaxsim.privacy.samplers import Sampler

Account = tuple[SamplingScheme, PrivacyEvent]


def accounts_of(
    algorithm: Algorithm, mechanism: Mechanism, sampler: Sampler
) -> tuple[Account, ...]:
    """Return the scheme and the event of each account that a run is charged to."""
    m = sampler.scheme.clients
    own = (sampler.scheme, mechanism.event)
    if algorithm.example_epsilon is None:
        return (own,)
    # Whoever sees a client's message knows that it took part.
    return own, (SamplingScheme("full", m, m), EXAMPLE)


def no_charges(accounts: Sequence[Account], places: int) -> Callable[[], tuple[Charges, ...]]:
    """Return the `no_charges` of a program; `places` as in `ledger.no_charges`."""
    return lambda: tuple(ledger.no_charges(*account, places) for account in accounts)


def charged(
    privacy: Ledger,
    accounts: Sequence[Account],
    charge: Callable[..., Charges],
    costs: Sequence[tuple[Any, Any]],
    round_: Any,
) -> Ledger:
    """Return the ledger with a round entered in each account.

    Args:
      privacy: the ledger before the round.
      accounts: as from `accounts_of`.
      charge: `(charges, noise multiplier, sampling rate, round) -> charges`.
      costs: noise multiplier and sampling rate for each account.
      round_: () int32.
    """
    for (scheme, event), cost in zip(accounts, costs, strict=True):

        def enter(charges, cost=cost):
            return charge(charges, *cost, round_)

        privacy = ledger.update(privacy, scheme, event, enter)
    return privacy
