"""Rounds of long schedules in groups, so that accountants need not look at each of them."""

from collections.abc import Sequence

import numpy as np

from fedjaxsim.privacy.events import Entry

_MOST_GROUPS = 32


def merge(entries: Sequence[Entry]) -> list[Entry]:
    """At most _MOST_GROUPS groups of rounds per sampling rate, each with the smallest z in it.

    Less noise only costs more, so the result stays an upper bound; it is exact up to _MOST_GROUPS
    different entries. Groups are narrow where the cost Σ 1/z² is: their number per logarithm of z
    is proportional to the root of its density, which wastes the least.

    Args:
      entries: the rounds, with z > 0.
    """
    if len(entries) <= _MOST_GROUPS:
        return list(entries)
    rounds = sorted(entries, key=lambda entry: (entry.sampling_rate, entry.noise_multiplier))
    groups: list[Entry] = []
    for rate in dict.fromkeys(entry.sampling_rate for entry in rounds):
        groups += _of_one_rate([entry for entry in rounds if entry.sampling_rate == rate])
    return groups


def _of_one_rate(rounds: list[Entry]) -> list[Entry]:
    logs = np.log([entry.noise_multiplier for entry in rounds])
    costs = np.array([entry.rounds for entry in rounds]) * np.exp(2 * (logs[0] - logs))
    steps = np.sqrt(costs[1:] * np.diff(logs))
    ends = np.concatenate([[0.0], np.cumsum(steps)])
    places = np.minimum(ends / (ends[-1] or 1.0) * _MOST_GROUPS, _MOST_GROUPS - 1).astype(int)
    groups: dict[int, Entry] = {}
    for place, entry in zip(places.tolist(), rounds, strict=True):
        first = groups.setdefault(place, entry._replace(rounds=0))
        groups[place] = first._replace(rounds=first.rounds + entry.rounds)
    return list(groups.values())


def merge_pure(entries: Sequence[Entry]) -> list[Entry]:
    """The same for entries that hold ε in the place of noise: each with the largest in its group.

    Args:
      entries: the rounds, with ε > 0.
    """

    def inverse(entry: Entry) -> Entry:
        return entry._replace(noise_multiplier=1 / entry.noise_multiplier)

    if len(entries) <= _MOST_GROUPS:
        return list(entries)
    return [inverse(entry) for entry in merge([inverse(entry) for entry in entries])]
