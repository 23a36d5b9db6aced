"""Groups of rounds of long schedules, to spare accountants the single rounds."""

from collections.abc import Sequence

import numpy as np

from fedjaxsim.privacy.entries import Entry


def merge(entries: Sequence[Entry], most: int) -> list[Entry]:
    """Merge rounds into at most `most` groups per sampling rate, each with its smallest z.

    Less noise only costs more, so the result stays an upper bound; it is exact up to `most`
    different entries. Groups are narrow where the cost Σ 1/z² is: their number per logarithm of z
    is proportional to the root of its density, which wastes the least.
    """
    if len(entries) <= most:
        return list(entries)
    rounds = sorted(entries, key=lambda entry: (entry.sampling_rate, entry.noise_multiplier))
    groups: list[Entry] = []
    for rate in dict.fromkeys(entry.sampling_rate for entry in rounds):
        groups += _of_one_rate([entry for entry in rounds if entry.sampling_rate == rate], most)
    return groups


def _of_one_rate(rounds: list[Entry], most: int) -> list[Entry]:
    logs = np.log([entry.noise_multiplier for entry in rounds])
    costs = np.array([entry.rounds for entry in rounds]) * np.exp(2 * (logs[0] - logs))
    steps = np.sqrt(costs[1:] * np.diff(logs))
    ends = np.concatenate([[0.0], np.cumsum(steps)])
    places = np.minimum(ends / (ends[-1] or 1.0) * most, most - 1).astype(int)
    groups: dict[int, Entry] = {}
    for place, entry in zip(places.tolist(), rounds, strict=True):
        first = groups.setdefault(place, entry._replace(rounds=0))
        groups[place] = first._replace(rounds=first.rounds + entry.rounds)
    return list(groups.values())
