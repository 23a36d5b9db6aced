"""A privacy guarantee as an object: never a bare ε, always with what it rests on."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

from fedjaxsim import notebook
from fedjaxsim.privacy.accounting import composition
from fedjaxsim.privacy.accounting.composition import ADJACENCIES, VIEWS, Adjacency, Status, View
from fedjaxsim.privacy.events import Drawn, PrivacySpend, SamplingScheme, drawn_twice

ADJACENCY_TEXT = {
    "zero_out": "one client's messages become zero (the numbers of add/remove)",
    "replace": "one client's whole data is replaced",
}
VIEW_TEXT = {
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
SECRET_SEED = (
    "The seed is secret and no other published run used it: runs of one seed draw the same cohorts "
    "and noise, and noise that is known or drawn twice can be subtracted."
)
SHARED_SEED = (
    "Runs of one seed share cohorts and noise here, so that they can be compared: at most one of "
    "them may be published under its ε."
)
SIMULATION = (
    "Noise is drawn in floating point: a simulation of the ideal Gaussian mechanism, not a "
    "hardened deployment."
)

CLOSED_DOOR = (
    "Rounds behind a closed door (local training, fine-tuning) release nothing and cost nothing. "
    "Publishing personal models is another matter: each protects all others, not its owner."
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
        return f"{who}: ε {self.value} at δ = {self.delta:.3g} ({self.accountant})"

    @property
    def value(self) -> str:
        """How ε stands to its value, which is rounded up, as in `≤ 1.234`; without one, `∞`."""
        if self.epsilon is None:
            return "∞"
        return f"{_STATUS_TEXT[self.status]} {_round_up(self.epsilon):.5g}"

    def most_found(self, false_alarms: float) -> float:
        """The greatest share of neighbours that any test finds out at so large a share of errors.

        The smaller of e^ε α + δ and 1 − e^−ε (1 − α − δ) (Wasserman and Zhou, 2010; Kairouz, Oh and
        Viswanath, 2015); 1 where nothing is guaranteed.

        Args:
          false_alarms: α in [0, 1], the share of cases without a change in which the test sees one.
        """
        if self.epsilon is None:
            return 1.0
        steep = min(self.epsilon, 700.0)  # e^700 is about the largest double
        low = math.exp(steep) * false_alarms + self.delta
        return min(1.0, low, 1 - math.exp(-steep) * (1 - false_alarms - self.delta))


@dataclasses.dataclass(frozen=True)
class Report:
    """All guarantees of one run.

    Attributes:
      guarantees: one for each adjacency and view.
      delta: the δ that they are for.
      charges: what they were computed from.
      draws: the rounds drawn from each key; None for a plan, which drew nothing.
      assumed: what the guarantees rest on besides, in sentences: numbers made from private data
        and taken as public, for example.
    """

    guarantees: tuple[Guarantee, ...]
    delta: float
    charges: tuple[PrivacySpend, ...] = ()
    draws: tuple[Drawn, ...] | None = None
    assumed: tuple[str, ...] = ()

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

    def resting_on(self, sentences: Sequence[str]) -> "Report":
        """The same, with more that it rests on."""

        def wider(known: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(dict.fromkeys((*known, *sentences)))

        found = [
            dataclasses.replace(each, assumptions=wider(each.assumptions))
            for each in self.guarantees
        ]
        return dataclasses.replace(self, guarantees=tuple(found), assumed=wider(self.assumed))

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
            words.append(f"ε {each.value} {adjacency}")
            kinds.append(each.status.replace("_", " "))
        if not kinds:
            why = "; ".join(reasons)
            return why if why.startswith("no guarantee") else f"no guarantee: {why}"
        view = "joint DP" if shown[0].view == "joint_dp" else "released sequence"
        kind = " and ".join(dict.fromkeys(kinds))
        return f"{', '.join(words)}, δ = {shown[0].delta:.3g} ({view}, {kind})"

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries: adjacency -> view -> accountant -> the guarantee's fields.

        The report of a run lists its draws as "draws": digest, first round and number of rounds.
        """
        nested: dict[str, Any] = {}
        for guarantee in self.guarantees:
            fields = dataclasses.asdict(guarantee)
            fields["assumptions"] = list(guarantee.assumptions)
            by_view = nested.setdefault(fields.pop("adjacency"), {})
            by_view.setdefault(fields.pop("view"), {})[fields.pop("accountant")] = fields
        if self.draws is not None:
            nested["draws"] = [each._asdict() for each in self.draws]
        return nested

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Report":
        """Read the report that `to_json` wrote, without its charges and draws.

        Raises:
          ValueError: if it is none.
        """
        try:
            found = [
                Guarantee(
                    adjacency=adjacency,  # type: ignore[arg-type]
                    view=view,
                    accountant=name,
                    **(fields | {"assumptions": tuple(fields["assumptions"])}),
                )
                for adjacency, views in content.items()
                if adjacency in ADJACENCIES
                for view, accountants in views.items()
                for name, fields in accountants.items()
            ]
            return cls(tuple(found), found[0].delta)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"it is no privacy report ({error})") from error

    def __repr__(self) -> str:
        """The unit and a line for each guarantee; `str` adds what they rest on."""
        return "\n".join(["Report of privacy", *(f"  {each}" for each in self.guarantees)])

    def _repr_html_(self) -> str:
        rows = [
            [
                each.adjacency,
                each.view,
                f"ε {each.value}" if each.epsilon is not None else f"none: {each.reason}",
                f"{each.delta:.3g}",
                each.accountant,
            ]
            for each in self.guarantees
        ]
        headings = ["adjacency", "view", "guarantee", "δ", "accountant"]
        sentences = dict.fromkeys(s for g in self.guarantees for s in g.assumptions)
        shown = notebook.table("Differential privacy", headings, rows)
        return shown + notebook.details("Assumptions", sentences)

    def __str__(self) -> str:
        """The guarantees and, once, what they rest on."""
        first = self.guarantees[0]
        lines = [f"Differential privacy, unit: one {first.unit}, {first.sampling} sampling"]
        lines += [f"  {guarantee}" for guarantee in self.guarantees]
        meanings = {**ADJACENCY_TEXT, **VIEW_TEXT}
        lines += [f"  {name}: {text}" for name, text in meanings.items()]
        sentences = dict.fromkeys(s for g in self.guarantees for s in g.assumptions)
        return "\n".join([*lines, *(f"  - {sentence}" for sentence in sentences)])


_NOTHING_SENT = "No client sends anything."


def _sampling_sentence(scheme: SamplingScheme) -> str:
    m = scheme.clients
    return {
        "poisson": f"Each of the {m} clients takes part independently of all others with the "
        "charged probability, and sums are divided by a public number.",
        "fixed": f"Cohorts of exactly {scheme.capacity} of {m} clients; other clients' "
        "participation reveals a client's own, so sampling hides nothing in joint_dp.",
        "capped": f"No client takes part more than {scheme.max_participations} times; the "
        "schedule is public, so sampling hides nothing.",
        "full": f"All {m} clients take part in every round.",
    }[scheme.kind]


def _assumptions(
    charges: Sequence[PrivacySpend], assumed: Sequence[str], delta: float
) -> list[str]:
    """The sentences of a guarantee, for charges that cost something."""
    if not charges:
        return [_NOTHING_SENT, METRICS]
    sentences = [TRUSTED_SERVER, *dict.fromkeys(_sampling_sentence(c.scheme) for c in charges)]
    for charged in charges:
        overflow = composition.overflow_probability(charged.entries, charged.scheme)
        if overflow > 0:
            sentences.append(
                f"Some cohort exceeds the {charged.scheme.capacity} places with probability at "
                f"most {overflow:.1e}; δ includes (1 + e^ε) times that."
            )
    m = charges[0].scheme.clients
    if delta > 1 / (10 * m):
        sentences.append(
            f"δ = {delta:.3g} is above 1/(10 m) = {1 / (10 * m):.3g}: publishing the data of one "
            f"random client would meet δ = 1/m = {1 / m:.3g}."
        )
    return [*sentences, *assumed, METRICS, SECRET_SEED, SIMULATION]


def _no_guarantee(charged: PrivacySpend) -> str:
    """Why no accountant need be asked about rounds of one kind, or an empty string."""
    noise = [entry.noise_multiplier for entry in charged.entries]
    if charged.redrawn:
        return (
            "the state drew a round's random numbers twice or from a foreign key, so its noise may "
            "cancel: run again from `init` with a new seed, and change no `round`, `key` or ledger "
            "of a state by hand"
        )
    if charged.overflowed:
        return (
            "the privacy ledger overflowed: it held too few different (z, p) for this run, or "
            "rounds came twice where participations are capped"
        )
    if charged.event.kind == "unprotected" and noise:
        return "no guarantee is known for this mechanism"
    if any(math.isnan(z) for z in noise):
        return "the noise multiplier of some round is not a number"
    if charged.event.kind == "pure" and any(math.isinf(z) for z in noise):
        return "the ε of some round is infinite"
    if charged.event.kind == "gaussian" and 0 in noise:
        return "no noise was added"
    return ""


def _no_epsilon(charges: Sequence[PrivacySpend], delta: float) -> str:
    """Why an accountant certified nothing."""
    for charged in charges:
        scheme = charged.scheme
        overflow = composition.overflow_probability(charged.entries, scheme)
        if overflow > 0:
            return (
                f"cohorts exceed the {scheme.capacity} places of the sampler with probability up "
                f"to {overflow:.2g}, and (1 + e^ε) times that does not fit into δ = {delta:.3g}: "
                f"give poisson() a larger capacity; {scheme.clients} are always enough"
            )
    return f"δ = {delta:.3g} is below what the accountant resolves for so many rounds"


def _certified(
    charges: Sequence[PrivacySpend],
    delta: float,
    accountant: str | None,
    adjacency: Adjacency,
    view: View,
) -> tuple[float, str, Status]:
    """ε of charges that all have a guarantee, the accountant's name and its status.

    Of unlike charges the ε is never below that of one of them alone: what is certified of the
    whole holds for its parts, but parts may have tighter accountants with other rounding.
    """
    if len(charges) == 1:
        return _alone(charges[0], delta, accountant, adjacency, view)
    from fedjaxsim.privacy.accounting import heterogeneous  # it starts slowly, and is rarely asked

    names = heterogeneous.accountants(charges, adjacency) if accountant is None else (accountant,)
    epsilon, name = min(
        (heterogeneous.profile(charges, adjacency, view, name).epsilon(delta), name)
        for name in names
    )
    if accountant is None:
        parts = [_alone(charged, delta, None, adjacency, view)[0] for charged in charges]
        epsilon = max(epsilon, *parts)
    return epsilon, name, "upper_bound"


def _alone(
    charged: PrivacySpend, delta: float, accountant: str | None, adjacency: Adjacency, view: View
) -> tuple[float, str, Status]:
    found = composition.profiles(charged, adjacency, view, accountant)
    epsilon, name = min((profile.epsilon(delta), name) for name, profile in found.items())
    return epsilon, name, composition.status(name, charged.entries, charged.scheme)


def spent(
    charges: Sequence[PrivacySpend],
    delta: float,
    adjacency: Adjacency = "zero_out",
    view: View = "joint_dp",
    accountant: str | None = None,
) -> float:
    """One ε of a `report`, which takes longer; inf where nothing is guaranteed.

    Args:
      charges: the rounds so far, of one or of several kinds.
      delta: the total δ in (0, 1).
      adjacency: "zero_out" or "replace".
      view: "joint_dp" or "released_sequence".
      accountant: one by name, which may not know the adjacency and view; by default the tightest.
    """
    spent = _spent(charges)
    if not spent:
        return 0.0
    if any(map(_no_guarantee, spent)):
        return math.inf
    if accountant is not None and not composition.knows(accountant, adjacency, view):
        return math.inf
    return _certified(spent, delta, accountant, adjacency, view)[0]


def _spent(charges: Sequence[PrivacySpend]) -> list[PrivacySpend]:
    """Those that cost something."""
    return [
        charged
        for charged in charges
        if charged.event.kind != "none" and (charged.entries or charged.overflowed)
    ]


def report(
    charges: Sequence[PrivacySpend],
    delta: float,
    accountant: str | None = None,
    *,
    draws: tuple[Drawn, ...] | None = None,
    assumed: Sequence[str] = (),
) -> Report:
    """The guarantees of a run: both adjacencies in both views.

    Args:
      charges: the rounds of one run, of one or of several kinds; `ledger.charged` gives them.
      delta: the total δ in (0, 1), overflow of cohorts included.
      accountant: one by name, for the adjacencies and views it knows; by default the tightest sound
        one for each.
      draws: the rounds drawn from each key; None for a plan, which drew nothing.
      assumed: what the guarantees rest on besides, in sentences: numbers made from private data
        and taken as public, for example.

    Raises:
      ValueError: if δ lies outside (0, 1), a ledger cannot come from its scheme, or the accountant
        does not describe a scheme and its event.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie in (0, 1), got {delta}")
    if accountant is not None:
        for charged in charges:
            if charged.event.kind != "none":
                composition.require_match(accountant, charged.scheme, charged.event)
    open_doors = [charged for charged in charges if charged.event.kind != "none"]
    spent = _spent(charges)
    reason = next(filter(None, map(_no_guarantee, spent)), "")
    if not reason:
        for charged in spent:
            composition.check_entries(charged.entries, charged.scheme)
    if spent and len(open_doors) < len(charges):
        assumed = (*assumed, CLOSED_DOOR)
    sentences = tuple(_assumptions(open_doors, assumed, delta))
    described = spent or open_doors or charges
    sampling = " and ".join(dict.fromkeys(charged.scheme.kind for charged in described)) or "none"

    def guarantee(adjacency: Adjacency, view: View) -> Guarantee:
        epsilon, name, status, why = None, accountant or "none", "none", reason
        if not spent:
            epsilon, status = 0.0, "exact"
        elif not why:
            epsilon, name, status = _certified(spent, delta, accountant, adjacency, view)
        if epsilon is not None and math.isinf(epsilon):
            epsilon, status, why = None, "none", _no_epsilon(spent, delta)
        return Guarantee(epsilon, delta, adjacency, view, sampling, name, status, sentences, why)

    found = tuple(
        guarantee(adjacency, view)
        for adjacency in ADJACENCIES
        for view in VIEWS
        if accountant is None or composition.knows(accountant, adjacency, view)
    )
    return Report(found, delta, tuple(spent), draws, tuple(assumed))


def together_published(
    reports: Sequence[Report], delta: float | None = None, accountant: str | None = None
) -> Report:
    """The guarantees of several runs on the same clients that are all published.

    Args:
      reports: of each run.
      delta: the total δ in (0, 1); by default the largest of the reports.
      accountant: as of `report`.

    Raises:
      ValueError: if two of them drew some round from the same key, as runs of one seed do, so that
        their guarantees do not compose; if one does not say what its run drew; or if they are about
        different numbers of clients.
    """
    if not reports:
        raise ValueError("composing guarantees needs at least one report, got none")
    clients = {charged.scheme.clients for one in reports for charged in one.charges}
    if len(clients) > 1:
        raise ValueError(f"reports must be about the same clients, got {sorted(clients)} of them")
    if any(one.draws is None for one in reports):
        raise ValueError("a report does not say what its run drew: take it from `guarantee`")
    drawn = {f"report {number}": one.draws or () for number, one in enumerate(reports, 1)}
    shared = drawn_twice(drawn)
    if shared:
        raise ValueError(f"{shared} Run again, with seeds of their own, what is to be published.")
    return report(
        [charged for one in reports for charged in one.charges],
        max(one.delta for one in reports) if delta is None else delta,
        accountant,
        draws=tuple(itertools.chain.from_iterable(drawn.values())),
        assumed=tuple(dict.fromkeys(sentence for one in reports for sentence in one.assumed)),
    )
