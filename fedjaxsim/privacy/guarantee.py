"""Privacy guarantees of a run: never a bare ε, always with adjacency, view and assumptions."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedjaxsim.privacy import filter as filters
from fedjaxsim.privacy import second_opinion
from fedjaxsim.privacy.accounting import composition, rdp
from fedjaxsim.privacy.assumptions import (
    KNOWN_SEED,
    LIMITED,
    METRICS,
    NO_RELEASE,
    OF_EXAMPLES,
    OF_PLAN,
    OF_SILOS,
    PLANNED,
    SAME_CLIENTS,
    SECRET_SEED,
    SIMULATION,
    no_guarantee,
    of_charges,
    rests_on_own_noise,
    tiny_silos,
)
from fedjaxsim.privacy.entries import (
    ADJACENCIES,
    VIEWS,
    Adjacency,
    Drawn,
    Status,
    Unit,
    View,
    check_delta,
    drawn_twice,
    epsilon_text,
    round_up,
)
from fedjaxsim.privacy.events import Examples, PrivacyLimit, PrivacySpend
from fedjaxsim.privacy.second_opinion import SecondOpinion
from fedjaxsim.privacy.silos import ExampleEpsilons, epsilons
from fedjaxsim.privacy.trade_off import TradeOff, trade_off

_FEW = 64
"""Number of different rounds that `rdp_epsilon` prices one by one; more are merged."""
_COARSE = 4.0
"""Grid of `coarse_epsilon`; see `composition.profiles`."""
_NOT_BEGUN = "a stage that protects examples has not begun, so its noise is not known"
_MEANINGS = {
    "zero_out": "one client's messages become zero (the numbers of add/remove)",
    "replace": "one client's whole data is replaced",
    "joint_dp": "against all other clients together, who know when they took part",
    "released_sequence": "against a reader of what the server published",
}
_STATUS_TEXT = {"exact": "=", "upper_bound": "≤"}


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """(ε, δ)-differential privacy of a run, in one adjacency and one view.

    ε, in nats, is never rounded down, and None where nothing is guaranteed, for a `reason`. The
    adversary, the `view`, is "joint_dp" (all other clients) or "released_sequence"; `assumptions`
    are sentences on what the guarantee assumes and does not cover. The adversary's `advantage` is
    the largest difference of a probability between the two neighbours (total variation): who
    guesses which of two equally likely ones took place is right with at most (1 + advantage)/2.
    None if it is not known.
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
    unit: Unit = "client"
    advantage: float | None = None

    def __str__(self) -> str:
        """Return one line, as in `zero_out, joint_dp: ε ≤ 1.234 at δ = 1e-05 (pld)`."""
        who, delta = f"{self.adjacency}, {self.view}", f"{self.delta:.3g}"
        if self.unit != "client":  # nobody chose this δ
            who, delta = f"one {self.unit}, {who}", f"{round_up(self.delta):.5g}"
        if self.epsilon is None:
            return f"{who}: no guarantee ({self.reason})"
        return f"{who}: ε {self.value} at δ = {delta} ({self.accountant})"

    @property
    def value(self) -> str:
        """The relation and ε, rounded up, as in `≤ 1.234`; `∞` without a guarantee."""
        if self.epsilon is None:
            return "∞"
        return f"{_STATUS_TEXT[self.status]} {epsilon_text(self.epsilon)}"


class Level(NamedTuple):
    """The joint-DP ε of a public group of clients that take part with a `share`, once drawn."""

    clients: int
    share: float
    epsilon: dict[Adjacency, float | None]

    def __str__(self) -> str:
        """Return one line, as in `60 clients with share 0.5: ε ≤ 1.23 (zero_out)`."""
        values = (f"ε ≤ {epsilon_text(value)} ({name})" for name, value in self.epsilon.items())
        return f"{self.clients} clients with share {self.share:.4g}: {', '.join(values)}"


@dataclasses.dataclass(frozen=True)
class Report:
    """All guarantees of one run: for each adjacency and view, then of protected single examples.

    Attributes:
      charges: the charges they were computed from; with a budget, all that it allows.
      draws: the rounds drawn from each key; None for a hypothetical run.
      assumed: further assumptions in sentences, such as numbers computed from private data and
        taken as public.
      examples: ε of single examples of each client, if clients protect them in gradients.
      levels: ε of each group of clients, if they have privacy levels; `guarantees` are about the
        one with share 1.
    """

    guarantees: tuple[Guarantee, ...]
    delta: float
    charges: tuple[PrivacySpend, ...] = ()
    draws: tuple[Drawn, ...] | None = None
    assumed: tuple[str, ...] = ()
    examples: ExampleEpsilons | None = None
    levels: tuple[Level, ...] = ()

    def find(self, adjacency: Adjacency, view: View = "joint_dp") -> Guarantee:
        """Return the guarantee for one adjacency and view; raise ValueError if there is none."""
        for guarantee in self.guarantees:
            if (guarantee.adjacency, guarantee.view) == (adjacency, view):
                return guarantee
        listed = ", ".join(f"({g.adjacency}, {g.view})" for g in self.guarantees)
        raise ValueError(f"the report has {listed}, but not ({adjacency}, {view})")

    def assuming(self, sentences: Sequence[str]) -> "Report":
        """Return the report with further assumptions."""

        def wider(assumptions: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(dict.fromkeys((*assumptions, *sentences)))

        guarantees = [
            dataclasses.replace(guarantee, assumptions=wider(guarantee.assumptions))
            for guarantee in self.guarantees
        ]
        return dataclasses.replace(self, guarantees=tuple(guarantees), assumed=wider(self.assumed))

    def of_secret_seed(self) -> "Report":
        """Return the report of a run whose seed nobody else knows or can guess."""

        def known(sentences: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(
                SECRET_SEED if sentence == KNOWN_SEED else sentence for sentence in sentences
            )

        changed = [
            dataclasses.replace(guarantee, assumptions=known(guarantee.assumptions))
            for guarantee in self.guarantees
        ]
        return dataclasses.replace(self, guarantees=tuple(changed))

    def verify(self) -> tuple[SecondOpinion, ...]:
        """Recompute the joint-DP ε of clients with dp_accounting (extra `verify`); return both.

        Raises:
          ValueError: if they differ by more than 1 %, if dp_accounting does not describe the
            releases, or if the report, as one read from a file, has no charges.
        """
        self._check_charges()
        costly, opinions = _costly(self.charges, "client"), []
        for guarantee in self.guarantees:
            if (guarantee.unit, guarantee.view) == (
                "client",
                "joint_dp",
            ) and guarantee.epsilon is not None:
                second = second_opinion.epsilon(costly, guarantee.delta, guarantee.adjacency)
                opinion = SecondOpinion(
                    guarantee.adjacency, guarantee.delta, guarantee.epsilon, second
                )
                if not opinion.agrees:
                    raise ValueError(f"two accountants differ by more than 1 %: {opinion}")
                opinions.append(opinion)
        return tuple(opinions)

    def curve(self, adjacency: Adjacency = "zero_out") -> TradeOff:
        """Compute the trade-off curve of clients' releases: what an attacker can tell from them.

        Raises:
          ValueError: if nothing is guaranteed, or if the report, as one read from a file, has no
            charges.
        """
        self._check_charges()
        guarantee = self.find(adjacency)
        if guarantee.epsilon is None:
            raise ValueError(f"there is no trade-off curve: {guarantee}")
        return trade_off(composition.profile(_costly(self.charges, "client"), adjacency), adjacency)

    def _check_charges(self) -> None:
        if self.charges == () and any(guarantee.epsilon for guarantee in self.guarantees):
            raise ValueError("the report has no charges: take it from a run, not from a file")

    def in_words(self) -> str:
        """Return what clients' guarantees mean for an attacker; "" if nothing is guaranteed."""
        chances = {
            guarantee.adjacency: f"{math.ceil(500 * (1 + guarantee.advantage)) / 10:g} % "
            f"({guarantee.adjacency})"
            for guarantee in self.guarantees
            if guarantee.unit == "client" and guarantee.advantage is not None
        }
        if not chances:
            return ""
        return (
            "Somebody who sees all this, and guesses which of two equally likely runs took place, "
            f"is right with a probability of at most {' or '.join(chances.values())}."
        )

    def short(self) -> str:
        """Return one line: `ε ≤ 1 zero-out, ε ≤ 2.2 replace, δ = 0.001 (joint DP, upper bound)`."""
        if self.examples is not None:
            of_clients = dataclasses.replace(self, examples=None).short()
            delta = f"δ ≤ {round_up(max(d for _, d in self.examples.largest.values())):.5g}"
            words = "; ".join([*self.examples.in_words(), delta])
            return f"one client, {of_clients}; one example, {words}"
        shown = [
            guarantee for guarantee in self.guarantees if guarantee.view == "joint_dp"
        ] or self.guarantees
        reasons = dict.fromkeys(
            guarantee.reason for guarantee in shown if guarantee.epsilon is None
        )
        words, kinds = [], []
        for guarantee in shown:
            adjacency = guarantee.adjacency.replace("_", "-")
            if guarantee.epsilon is None:
                words.append(f"no ε {adjacency} ({guarantee.reason})")
                continue
            words.append(f"ε {guarantee.value} {adjacency}")
            kinds.append(guarantee.status.replace("_", " "))
        if not kinds:
            why = "; ".join(reasons)
            return why if why.startswith("no guarantee") else f"no guarantee: {why}"
        view = "joint DP" if shown[0].view == "joint_dp" else "released sequence"
        kind = " and ".join(dict.fromkeys(kinds))
        if any(rests_on_own_noise(guarantee.assumptions) for guarantee in shown):
            kind += ", if your own code draws the noise that it charges"
        return f"{', '.join(words)}, δ = {shown[0].delta:.3g} ({view}, {kind})"

    def epsilons(self) -> dict[str, float | None]:
        """Return the joint-DP ε of clients, and ε and δ of protected examples, by column.

        Tables of results have the same columns; None is no guarantee.
        """
        epsilons: dict[str, float | None] = {}
        for guarantee in self.guarantees:
            is_of_example = guarantee.unit == "example"
            if is_of_example or guarantee.view == "joint_dp":
                adjacency = "_replace" * (guarantee.adjacency == "replace")
                epsilons[f"{'example_' * is_of_example}epsilon{adjacency}"] = guarantee.epsilon
            if is_of_example:
                epsilons["example_delta"] = max(
                    guarantee.delta, epsilons.get("example_delta") or 0.0
                )
        return epsilons

    def of_examples(self) -> str:
        """Return one line on the guarantees of single examples; "" if no example is protected."""
        shown = [guarantee for guarantee in self.guarantees if guarantee.unit == "example"]
        return "; ".join(dict.fromkeys(map(str, shown)))

    def to_json(self) -> dict[str, Any]:
        """Return plain dictionaries: adjacency -> view -> accountant -> the guarantee's fields.

        The same nest of single examples is under "example", if clients protect them. The report of
        a run lists its draws as "draws": digest and number of rounds. Further assumptions are under
        "assumed".
        """
        nested: dict[str, Any] = {}
        for guarantee in self.guarantees:
            fields = dataclasses.asdict(guarantee)
            fields["assumptions"] = list(guarantee.assumptions)
            of_unit = (
                nested if guarantee.unit == "client" else nested.setdefault(guarantee.unit, {})
            )
            by_view = of_unit.setdefault(fields.pop("adjacency"), {})
            by_view.setdefault(fields.pop("view"), {})[fields.pop("accountant")] = fields
        if self.examples is not None:
            nested["example"]["clients"] = {
                adjacency: self.examples.summary(adjacency) for adjacency in ADJACENCIES
            } | {"delta": [round_up(value) for value in self.examples.delta.tolist()]}
        if self.draws is not None:
            nested["draws"] = [draws._asdict() for draws in self.draws]
        if self.levels:
            nested["levels"] = [level._asdict() for level in self.levels]
        return nested | {"assumed": list(self.assumed)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Report":
        """Read the report that `to_json` wrote, without charges and draws, or raise ValueError."""
        try:
            guarantees = [
                Guarantee(
                    adjacency=adjacency,  # type: ignore[arg-type]
                    view=view,
                    accountant=name,
                    **(fields | {"assumptions": tuple(fields["assumptions"])}),
                )
                for adjacency, views in (*content.items(), *content.get("example", {}).items())
                if adjacency in ADJACENCIES
                for view, accountants in views.items()
                for name, fields in accountants.items()
            ]
            levels = tuple(Level(**values) for values in content.get("levels", ()))
            assumed = tuple(content["assumed"])
            return cls(tuple(guarantees), guarantees[0].delta, assumed=assumed, levels=levels)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"it is no privacy report ({error})") from error

    def __repr__(self) -> str:
        """Return the unit and a line for each guarantee; `str` adds the assumptions."""
        return "\n".join(
            ["Report of privacy", *(f"  {guarantee}" for guarantee in self.guarantees)]
        )

    def __str__(self) -> str:
        """Return the guarantees, then their assumptions, each once."""
        first = self.guarantees[0]
        lines = [f"Differential privacy, unit: one {first.unit}, {first.sampling} sampling"]
        lines += [f"  {guarantee}" for guarantee in self.guarantees]
        if self.examples is not None:
            lines += [f"  one example, {text}" for text in self.examples.in_words()]
        lines += [f"  {level}" for level in self.levels]
        lines += [f"  {name}: {text}" for name, text in _MEANINGS.items()]
        lines += [f"  {words}"] if (words := self.in_words()) else []
        sentences = dict.fromkeys(s for guarantee in self.guarantees for s in guarantee.assumptions)
        return "\n".join([*lines, *(f"  - {sentence}" for sentence in sentences)])


@functools.lru_cache(maxsize=1024)
def _certified(
    charges: tuple[PrivacySpend, ...], delta: float, adjacency: Adjacency
) -> tuple[float, str, Status]:
    """Compute ε of charges that all have a guarantee, with the accountant's name and status."""
    by_accountant, status = composition.profiles(charges, adjacency)
    epsilon, name = min((profile.epsilon(delta), name) for name, profile in by_accountant.items())
    return epsilon, name, status


def _advantage(charges: Sequence[PrivacySpend], adjacency: Adjacency) -> float:
    """Compute δ at ε = 0."""
    return composition.profile(charges, adjacency).delta(0.0)


def tight_epsilon(
    charges: Sequence[PrivacySpend], delta: float, adjacency: Adjacency = "zero_out"
) -> float:
    """Compute the joint-DP ε of a `report`: by privacy losses on a grid, or a closed form.

    It is inf if nothing is guaranteed. The first call for some charges takes up to a second.
    """
    costly = _costly(charges, "client")
    if not costly or any(map(no_guarantee, costly)):
        return math.inf if costly else 0.0
    return _certified(tuple(costly), delta, adjacency)[0]


def rdp_epsilon(
    charges: Sequence[PrivacySpend], delta: float, adjacency: Adjacency = "zero_out"
) -> float:
    """Compute an upper bound on `tight_epsilon` by Rényi divergences, in about a millisecond.

    Each new (z, p) costs some milliseconds once. Schedules of more than 64 rounds are merged anew
    each time, in up to a tenth of a second.
    """
    costly = _costly(charges, "client")
    if not costly or any(map(no_guarantee, costly)):
        return math.inf if costly else 0.0
    merged = [c._replace(entries=tuple(composition.merge(c.entries, _FEW))) for c in costly]
    return rdp.epsilon(composition.rdp_of(merged, adjacency, rdp.ORDERS), delta)


def coarse_epsilon(
    charges: Sequence[PrivacySpend], delta: float, adjacency: Adjacency = "zero_out"
) -> float:
    """Estimate `tight_epsilon` within some percent, in a fraction of its time; a start of searches.

    It is inf if no privacy losses are known.
    """
    costly = _costly(charges, "client")
    if not costly or any(map(no_guarantee, costly)):
        return math.inf if costly else 0.0
    [estimate] = composition.profiles(costly, adjacency, "pld", _COARSE)[0].values()
    return estimate.epsilon(delta)


def _costly(charges: Sequence[PrivacySpend], unit: Unit) -> list[PrivacySpend]:
    """Return the charges of a unit with a cost."""
    of_unit = [
        charged for charged in charges if charged.event.unit == unit and charged.event.releases
    ]
    return [charged for charged in of_unit if charged.entries or charged.overflowed]


def _with_rounds(charged: PrivacySpend, more: int) -> PrivacySpend:
    """Return charges with more rounds like the costliest ones, as the last stage's may be."""
    costliest = min(charged.entries)
    entries = [entry for entry in charged.entries if entry is not costliest]
    more_of_it = costliest._replace(rounds=costliest.rounds + more)
    return charged._replace(entries=(more_of_it, *entries))


def _of_examples(
    charges: Sequence[PrivacySpend], delta: float, assumed: Sequence[str], why: str
) -> Guarantee:
    epsilon, name, status, advantage = None, "none", "none", None
    why = next(filter(None, map(no_guarantee, charges)), why)
    if not why:
        epsilon, name, status = _certified(tuple(charges), delta, "replace")
        advantage = _advantage(charges, "replace")
    return Guarantee(
        epsilon, delta, "replace", "released_sequence", charges[0].scheme.kind, name, status,
        (*OF_EXAMPLES, *assumed, KNOWN_SEED, SIMULATION), why, "example", advantage,
    )  # fmt: skip


def _of_silos(
    examples: ExampleEpsilons, charges: Sequence[PrivacySpend], assumed: Sequence[str], why: str
) -> tuple[Guarantee, ...]:
    """Return the guarantees of single examples that clients protect in their gradients."""
    why = next(filter(None, map(no_guarantee, charges)), why)
    few = tiny_silos(examples.counts.tolist(), examples.delta.tolist())
    sentences = (*few, *OF_SILOS, *assumed, METRICS, KNOWN_SEED, SIMULATION)

    def guarantee(adjacency: Adjacency) -> Guarantee:
        epsilon, delta = examples.largest[adjacency]
        lacks = why or ("" if math.isfinite(epsilon) else "no ε is certified for some client")
        return Guarantee(
            None if lacks else epsilon, delta, adjacency,
            "released_sequence", "poisson", "none" if lacks else "pld",
            "none" if lacks else "upper_bound", sentences, lacks, "example",
        )  # fmt: skip

    return tuple(map(guarantee, ADJACENCIES))


def _levels(charges: Sequence[PrivacySpend], delta: float) -> tuple[Level, ...]:
    """Return ε of each group of clients with a privacy level; () if stages have unlike groups."""
    level_sets = {charged.scheme.levels for charged in charges} - {()}
    if len(level_sets) != 1:
        return ()

    def of(share: float) -> list[PrivacySpend]:
        return [
            charged._replace(scheme=charged.scheme.at_share(share))
            if charged.scheme.levels and not charged.event.of_whole_run
            else charged
            for charged in charges
        ]

    levels = []
    for count, share in level_sets.pop():
        finite: dict[Adjacency, float | None] = {}
        for name in ADJACENCIES:
            value = tight_epsilon(of(share), delta, name)
            finite[name] = value if value < math.inf else None
        levels.append(Level(count, share, finite))
    return tuple(level for level in levels if level.clients)


def report(
    charges: Sequence[PrivacySpend],
    delta: float,
    *,
    draws: tuple[Drawn, ...] | None = None,
    assumed: Sequence[str] = (),
    limit: PrivacyLimit | None = None,
    minibatches: Sequence[int] | None = None,
    left: int | None = None,
    later: Sequence[PrivacySpend] = (),
) -> Report:
    """Compute the guarantees of a run: both adjacencies in both views.

    Args:
      charges: the rounds of one run, of one or of several kinds; `ledger.charged` gives them.
      delta: the total δ in (0, 1), overflow of cohorts included.
      draws: the rounds drawn from each key; None for a hypothetical run.
      assumed: further assumptions in sentences; see `Report`.
      limit: the budget that the run kept: the guarantees then cover all that it allows.
      minibatches: (m,) the minibatches of each client that protects examples; by default in
        all rounds.
      left: rounds that were planned besides those done; None if the time to stop is fixed. Examples
        are charged for all planned rounds, since they keep no budget.
      later: charges of clients' other releases in the rounds left, such as evaluations.

    Raises:
      ValueError: if δ lies outside (0, 1), or a ledger cannot come from its scheme.
    """
    check_delta(delta)
    examples, costly = _costly(charges, "example"), _costly(charges, "client")
    number = sum(charged.event.unit == "example" for charged in charges)
    charges = [charged for charged in charges if charged.event.unit == "client"]
    released = [charged for charged in charges if charged.event.releases]
    if len(released) < len(charges) and costly:
        assumed = (*assumed, NO_RELEASE)
    reason = next(filter(None, map(no_guarantee, costly)), "")
    limited, allowed = (), costly
    if limit is not None and costly:
        reason = reason or filters.exceeded(limit, costly)
        limited = (LIMITED.format(filters.described(limit.planned)),)
        released = allowed = list(limit.planned)
    sentences = of_charges(released, (*(limited or (PLANNED,)), *assumed), delta)
    described = costly or charges
    sampling = " and ".join(dict.fromkeys(charged.scheme.kind for charged in described)) or "none"

    def guarantees(adjacency: Adjacency) -> list[Guarantee]:
        epsilon, name, status, why = None, "none", "none", reason
        advantage = None
        if not costly:
            epsilon, status, advantage = 0.0, "exact", 0.0
        elif not why:
            epsilon, name, status = _certified(tuple(allowed), delta, adjacency)
            status = status if limit is None else "upper_bound"
        if epsilon is not None and math.isinf(epsilon):
            epsilon, status = None, "none"
            why = (
                f"no ε is known: the mechanism has no cost for {adjacency}, or δ = {delta:.3g} is "
                "below what the accountant resolves for this number of rounds"
            )
        # The accountants' ε is for joint DP, which bounds that of the released sequence.
        if epsilon:
            advantage = _advantage(allowed, adjacency)
        facts = sampling, name, status, sentences, why, "client", advantage
        return [Guarantee(epsilon, delta, adjacency, view, *facts) for view in VIEWS]

    all_guarantees = tuple(itertools.chain.from_iterable(map(guarantees, ADJACENCIES)))
    # A client's release dominates one about each of its examples.
    also = [charged for charged in (*costly, *later) if not charged.event.of_protected]
    why, choices = "", PLANNED if left is None else OF_PLAN
    if limit is not None and left is None:
        why = "the run may stop by its releases, and how many rounds were planned is not known"
    if left:
        why = why or _NOT_BEGUN * (number > len(examples))
        examples, minibatches = [_with_rounds(charged, left) for charged in examples], None
    of_silos = [charged for charged in examples if isinstance(charged.event, Examples)]
    silos = epsilons(of_silos, minibatches, also) if of_silos else None
    if silos is not None:
        all_guarantees += _of_silos(silos, (*of_silos, *also), (choices, *assumed), why)
    elif examples:
        all_guarantees += (_of_examples((*examples, *also), delta, (choices, *assumed), why),)
    levels = () if reason else _levels(allowed, delta)
    return Report(
        all_guarantees, delta, (*allowed, *examples), draws, (*assumed, *limited), silos, levels
    )


def compose_reports(reports: Sequence[Report], delta: float | None = None) -> Report:
    """Compute the guarantees of several published runs on the same clients.

    The total `delta` is by default the largest of the reports.

    Raises:
      ValueError: if two runs drew a round from the same key, as runs of one seed do (their
        guarantees do not compose), a report lacks its draws, the reports are about different
        numbers of clients, or only some protect examples.
    """
    if not reports:
        raise ValueError("reports must hold at least one report, got none")
    clients = {charged.scheme.clients for run_report in reports for charged in run_report.charges}
    if len(clients) > 1:
        raise ValueError(f"reports must be about the same clients, got {sorted(clients)} of them")
    if any(run_report.draws is None for run_report in reports):
        raise ValueError("a report lacks its draws: take it from `guarantee`")
    protects = {
        any(charged.event.unit == "example" for charged in run_report.charges)
        for run_report in reports
    }
    if len(protects) > 1:
        raise ValueError(
            "some runs protect examples and the others do not: no ε of examples holds for all"
        )
    drawn = {
        f"report {number}": run_report.draws or () for number, run_report in enumerate(reports, 1)
    }
    if shared := drawn_twice(drawn):
        raise ValueError(f"{shared} Run the others again, each with its own seed.")
    return report(
        [charged for run_report in reports for charged in run_report.charges],
        max(run_report.delta for run_report in reports) if delta is None else delta,
        draws=tuple(itertools.chain.from_iterable(drawn.values())),
        assumed=tuple(
            dict.fromkeys(
                sentence
                for sentences in (*(run_report.assumed for run_report in reports), (SAME_CLIENTS,))
                for sentence in sentences
            )
        ),
    )
