"""A privacy guarantee as an object: never a bare ε, always with what it rests on."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

from fedjaxsim.privacy.accounting import composition
from fedjaxsim.privacy.accounting.composition import ADJACENCIES, VIEWS, Adjacency, Status, View
from fedjaxsim.privacy.accounting.profile import Profile
from fedjaxsim.privacy.events import Event, Scheme
from fedjaxsim.privacy.ledger import Entry, Ledger, entries

_ADJACENCY_TEXT = {
    "zero_out": "one client's messages become zero (the numbers of add/remove)",
    "replace": "one client's whole data is replaced",
}
_VIEW_TEXT = {
    "joint_dp": "against all other clients together, who know when they took part",
    "released_sequence": "against a reader of what the server published",
}
_STATUS_TEXT = {"exact": "=", "upper_bound": "≤", "approximate": "≈"}

TRUSTED_SERVER = (
    "A trusted server clips, sums and noises; clients see only what it publishes and their own."
)
METRICS = (
    "Metrics, losses, norms, realised cohort sizes and choices made with them (early stopping, the "
    "best of a sweep) are not protected: publishing them needs a budget of its own."
)
SIMULATION = (
    "Noise is drawn in floating point: a simulation of the ideal Gaussian mechanism, not a "
    "hardened deployment."
)


def default_delta(num_clients: int) -> float:
    """δ = 1/(10 m), the largest that is reported without a remark.

    δ = 1/m, as in many papers, is met by publishing the data of one random client.

    Args:
      num_clients: m ≥ 1.
    """
    if num_clients < 1:
        raise ValueError(f"num_clients must be at least 1, got {num_clients}")
    return 1 / (10 * num_clients)


def _round_up(epsilon: float) -> float:
    """ε to five significant digits, never below it."""
    if epsilon == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 4)
    return math.ceil(epsilon / unit) * unit


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """(ε, δ)-differential privacy of a run, in one adjacency and one view.

    Attributes:
      epsilon: ε in nats, never rounded down; None where nothing is guaranteed.
      delta: δ in (0, 1).
      adjacency: which two inputs are neighbours: "zero_out" or "replace".
      view: who looks: "joint_dp" (all other clients) or "released_sequence".
      sampling: the kind of the sampling scheme.
      accountant: the name of the accountant that ε comes from.
      status: "exact", "upper_bound", "approximate" (no bound at all) or "none".
      assumptions: what the guarantee rests on, and what it does not cover, in sentences.
      reason: why there is no guarantee; empty where there is one.
      unit: whose data is protected.
    """

    epsilon: float | None
    delta: float
    adjacency: Adjacency
    view: View
    sampling: str
    accountant: str
    status: Status
    assumptions: tuple[str, ...]
    reason: str = ""
    unit: Literal["client", "example"] = "client"

    def __str__(self) -> str:
        """One line, as in `zero_out, joint_dp: ε ≤ 1.234 at δ = 1e-05 (pld)`."""
        who = f"{self.adjacency}, {self.view}"
        if self.epsilon is None:
            return f"{who}: no guarantee ({self.reason})"
        sign = _STATUS_TEXT[self.status]
        value = _round_up(self.epsilon)
        return f"{who}: ε {sign} {value:.5g} at δ = {self.delta:.3g} ({self.accountant})"


@dataclasses.dataclass(frozen=True)
class Report:
    """All guarantees of one run."""

    guarantees: tuple[Guarantee, ...]

    def find(self, adjacency: Adjacency, view: View = "joint_dp") -> Guarantee:
        """The guarantee for one adjacency and view.

        Raises:
          ValueError: if the report has none.
        """
        for guarantee in self.guarantees:
            if (guarantee.adjacency, guarantee.view) == (adjacency, view):
                return guarantee
        known = ", ".join(f"({g.adjacency}, {g.view})" for g in self.guarantees)
        raise ValueError(f"the report has {known}, but not ({adjacency}, {view})")

    def short(self) -> str:
        """One line, as in `ε ≤ 1 zero-out, ε ≤ 2.23 replace, δ = 0.001 (joint DP, upper bound)`."""
        shown = [each for each in self.guarantees if each.view == "joint_dp"] or self.guarantees
        reasons = dict.fromkeys(each.reason for each in shown if each.epsilon is None)
        words, kinds = [], []
        for each in shown:
            adjacency = each.adjacency.replace("_", "-")
            if each.epsilon is None:
                words.append(f"no ε {adjacency} ({each.reason})")
                continue
            sign, value = _STATUS_TEXT[each.status], _round_up(each.epsilon)
            words.append(f"ε {sign} {value:.5g} {adjacency}")
            kinds.append(each.status.replace("_", " "))
        if not kinds:
            return f"no guarantee: {'; '.join(reasons)}"
        view = "joint DP" if shown[0].view == "joint_dp" else "released sequence"
        kind = " and ".join(dict.fromkeys(kinds))
        return f"{', '.join(words)}, δ = {shown[0].delta:.3g} ({view}, {kind})"

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries: adjacency -> view -> accountant -> the guarantee's fields."""
        nested: dict[str, Any] = {}
        for guarantee in self.guarantees:
            fields = dataclasses.asdict(guarantee)
            fields["assumptions"] = list(guarantee.assumptions)
            by_view = nested.setdefault(fields.pop("adjacency"), {})
            by_view.setdefault(fields.pop("view"), {})[fields.pop("accountant")] = fields
        return nested

    def __str__(self) -> str:
        """The guarantees and, once, what they rest on."""
        first = self.guarantees[0]
        lines = [f"Differential privacy, unit: one {first.unit}, {first.sampling} sampling"]
        lines += [f"  {guarantee}" for guarantee in self.guarantees]
        meanings = {**_ADJACENCY_TEXT, **_VIEW_TEXT}
        lines += [f"  {name}: {text}" for name, text in meanings.items()]
        sentences = dict.fromkeys(s for g in self.guarantees for s in g.assumptions)
        return "\n".join([*lines, *(f"  - {sentence}" for sentence in sentences)])


def _assumptions(scheme: Scheme, event: Event, delta: float, overflow: float) -> tuple[str, ...]:
    """The sentences of a guarantee."""
    if event.kind == "none":
        return "No client sends anything.", METRICS
    m = scheme.clients
    sampling = {
        "poisson": f"Each of the {m} clients takes part independently of all others with the "
        "charged probability, and sums are divided by a public number.",
        "fixed": f"Cohorts of exactly {scheme.capacity} of {m} clients; other clients' "
        "participation reveals a client's own, so sampling hides nothing in joint_dp.",
        "capped": f"No client takes part more than {scheme.max_participations} times; the "
        "schedule is public, so sampling hides nothing.",
        "everyone": f"All {m} clients take part in every round.",
    }[scheme.kind]
    sentences = [TRUSTED_SERVER, sampling]
    if overflow > 0:
        sentences.append(
            f"Some cohort exceeds the {scheme.capacity} places with probability at most "
            f"{overflow:.1e}; δ includes (1 + e^ε) times that."
        )
    if delta > 1 / (10 * m):
        sentences.append(
            f"δ = {delta:.3g} is above 1/(10 m) = {1 / (10 * m):.3g}: publishing the data of one "
            f"random client would meet δ = 1/m = {1 / m:.3g}."
        )
    return (*sentences, METRICS, SIMULATION)


def _no_guarantee(ledger: Ledger, spent: Sequence[Entry], event: Event) -> str:
    """Why no accountant need be asked, or an empty string."""
    if event.kind == "none":
        return ""
    if bool(ledger.overflowed):
        return "the privacy ledger overflowed: it held too few different (z, p) for this run"
    if event.kind == "unprotected":
        return "no guarantee is known for this mechanism"
    if any(math.isnan(entry.noise_multiplier) for entry in spent):
        return "the noise multiplier of some round is not a number"
    if event.kind == "pure" and any(math.isinf(entry.noise_multiplier) for entry in spent):
        return "the ε of some round is infinite"
    if event.kind == "gaussian" and any(entry.noise_multiplier == 0 for entry in spent):
        return "no noise was added"
    return ""


def _no_epsilon(delta: float, overflow: float) -> str:
    """Why an accountant certified nothing."""
    if overflow > 0:
        return (
            f"cohorts exceed their places with probability up to {overflow:.2g}, and (1 + e^ε) "
            f"times that does not fit into δ = {delta:.3g}"
        )
    return f"δ = {delta:.3g} is below what the accountant resolves for so many rounds"


def report(
    ledger: Ledger, scheme: Scheme, event: Event, delta: float, accountant: str | None = None
) -> Report:
    """The guarantees of a run: both adjacencies in both views.

    Args:
      ledger: the rounds of one run.
      scheme: how cohorts were drawn.
      event: what one round released.
      delta: the total δ in (0, 1), overflow of cohorts included.
      accountant: one by name, for the adjacencies and views it knows; by default the tightest sound
        one for each.

    Raises:
      ValueError: if δ lies outside (0, 1), the ledger cannot come from the scheme, or the
        accountant does not describe the scheme and the event.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie in (0, 1), got {delta}")
    if accountant is not None:
        composition.require_match(accountant, scheme, event)
    spent = entries(ledger)
    described = composition.effective_scheme(spent, scheme) if accountant is None else scheme
    reason = _no_guarantee(ledger, spent, event)
    overflow = 0.0
    if spent and event.kind != "none" and not reason:
        composition.check_entries(spent, scheme)
        overflow = composition.overflow_probability(spent, scheme)
    sentences = _assumptions(scheme, event, delta, overflow)
    profiles: dict[tuple[Adjacency, str], Profile] = {}

    def certified(adjacency: Adjacency, view: View, name: str) -> float:
        key = adjacency, name  # Where an accountant knows both views, they have one profile.
        if key not in profiles:
            profiles[key] = composition.profile(spent, described, event, adjacency, view, name)
        return profiles[key].epsilon(delta)

    def guarantee(adjacency: Adjacency, view: View, names: Sequence[str]) -> Guarantee:
        epsilon, name, status, why = None, names[0] if names else "none", "none", reason
        if not why and (event.kind == "none" or not spent):
            epsilon, status = 0.0, "exact"
        elif not why:
            epsilon, name = min((certified(adjacency, view, name), name) for name in names)
            status = composition.status(name, spent, described)
        if epsilon is not None and math.isinf(epsilon):
            epsilon, status, why = None, "none", _no_epsilon(delta, overflow)
        return Guarantee(epsilon, delta, adjacency, view, scheme.kind, name, status, sentences, why)

    found = []
    for adjacency in ADJACENCIES:
        for view in VIEWS:
            if accountant is None:
                names = composition.default_accountants(described, event, adjacency, view)
                found.append(guarantee(adjacency, view, names))
            elif composition.knows(accountant, adjacency, view):
                found.append(guarantee(adjacency, view, (accountant,)))
    return Report(tuple(found))
