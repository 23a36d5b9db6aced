"""A guarantee and a report of guarantees: what is promised, to whom, under which assumptions."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from fedjaxsim import notebook
from fedjaxsim.privacy.entries import ADJACENCIES, Adjacency, Status, Unit, View
from fedjaxsim.privacy.events import Drawn, PrivacySpend
from fedjaxsim.privacy.silos import ExampleEpsilons, round_up

ADJACENCY_TEXT = {
    "zero_out": "one client's messages become zero (the numbers of add/remove)",
    "replace": "one client's whole data is replaced",
}
VIEW_TEXT = {
    "joint_dp": "against all other clients together, who know when they took part",
    "released_sequence": "against a reader of what the server published",
}
_STATUS_TEXT = {"exact": "=", "upper_bound": "≤", "approximate": "≈"}


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """(ε, δ)-differential privacy of a run, in one adjacency and one view.

    Attributes:
      epsilon: ε in nats, never rounded down; None where nothing is guaranteed.
      delta: δ in (0, 1).
      adjacency: the neighbouring inputs, "zero_out" or "replace".
      view: the adversary, "joint_dp" (all other clients) or "released_sequence".
      sampling: the kind of the sampling scheme.
      accountant: the name of the accountant.
      status: "exact", "upper_bound", "approximate" (no bound at all) or "none".
      assumptions: sentences on what the guarantee assumes and does not cover.
      reason: why there is no guarantee; empty if there is one.
      unit: the protected unit.
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

    def __str__(self) -> str:
        """Return one line, as in `zero_out, joint_dp: ε ≤ 1.234 at δ = 1e-05 (pld)`."""
        who = f"{self.adjacency}, {self.view}"
        if self.unit != "client":
            who = f"one {self.unit}, {who}"
        if self.epsilon is None:
            return f"{who}: no guarantee ({self.reason})"
        return f"{who}: ε {self.value} at δ = {self.delta:.3g} ({self.accountant})"

    @property
    def value(self) -> str:
        """The relation and ε, rounded up, as in `≤ 1.234`; `∞` without a guarantee."""
        if self.epsilon is None:
            return "∞"
        return f"{_STATUS_TEXT[self.status]} {round_up(self.epsilon):.5g}"

    @property
    def meaning(self) -> tuple[str, str]:
        """The neighbouring inputs and the adversary, in words."""
        if self.unit == "example":
            change = "is replaced" if self.adjacency == "replace" else "becomes none"
            return f"one example of a client {change}", "against all who see its messages"
        return ADJACENCY_TEXT[self.adjacency], VIEW_TEXT[self.view]

    def largest_power(self, false_positives: float) -> float:
        """Return the largest true positive rate of any test at the false positive rate α.

        The smaller of e^ε α + δ and 1 − e^−ε (1 − α − δ) (Wasserman and Zhou, 2010; Kairouz, Oh and
        Viswanath, 2015); 1 where nothing is guaranteed.
        """
        if self.epsilon is None:
            return 1.0
        steep = min(self.epsilon, 700.0)  # e^700 is about the largest double
        low = math.exp(steep) * false_positives + self.delta
        return min(1.0, low, 1 - math.exp(-steep) * (1 - false_positives - self.delta))


@dataclasses.dataclass(frozen=True)
class Report:
    """All guarantees of one run.

    Attributes:
      guarantees: one for each adjacency and view; then those of single examples, if clients
        protect them.
      delta: their δ.
      charges: the charges they were computed from; with a budget, all that it allows.
      draws: the rounds drawn from each key; None for a hypothetical run.
      assumed: further assumptions in sentences, such as numbers computed from private data and
        taken as public.
      examples: ε of single examples of each client, if clients protect them in gradients.
    """

    guarantees: tuple[Guarantee, ...]
    delta: float
    charges: tuple[PrivacySpend, ...] = ()
    draws: tuple[Drawn, ...] | None = None
    assumed: tuple[str, ...] = ()
    examples: ExampleEpsilons | None = None

    def find(self, adjacency: Adjacency, view: View = "joint_dp") -> Guarantee:
        """Return the guarantee for one adjacency and view; raise ValueError if there is none."""
        for guarantee in self.guarantees:
            if (guarantee.adjacency, guarantee.view) == (adjacency, view):
                return guarantee
        known = ", ".join(f"({g.adjacency}, {g.view})" for g in self.guarantees)
        raise ValueError(f"the report has {known}, but not ({adjacency}, {view})")

    def assuming(self, sentences: Sequence[str]) -> "Report":
        """Return the report with further assumptions."""

        def wider(known: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(dict.fromkeys((*known, *sentences)))

        found = [
            dataclasses.replace(each, assumptions=wider(each.assumptions))
            for each in self.guarantees
        ]
        return dataclasses.replace(self, guarantees=tuple(found), assumed=wider(self.assumed))

    def short(self) -> str:
        """Return one line: `ε ≤ 1 zero-out, ε ≤ 2.2 replace, δ = 0.001 (joint DP, upper bound)`."""
        if self.examples is not None:
            of_clients = dataclasses.replace(self, examples=None).short()
            delta = f"δ ≤ {round_up(max(d for _, d in self.examples.largest.values())):.5g}"
            words = "; ".join([*self.examples.in_words(), delta])
            return f"one client, {of_clients}; one example, {words}"
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
            nested["draws"] = [each._asdict() for each in self.draws]
        return nested | {"assumed": list(self.assumed)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Report":
        """Read the report that `to_json` wrote, without charges and draws.

        Raises:
          ValueError: for any other content.
        """
        try:
            found = [
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
            return cls(tuple(found), found[0].delta, assumed=tuple(content["assumed"]))
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"it is no privacy report ({error})") from error

    def __repr__(self) -> str:
        """Return the unit and a line for each guarantee; `str` adds the assumptions."""
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
        shown = notebook.table("Differential privacy", headings, rows)
        return shown + notebook.details("Assumptions", self._sentences())

    def _sentences(self) -> dict[str, None]:
        return dict.fromkeys(s for g in self.guarantees for s in g.assumptions)

    def __str__(self) -> str:
        """Return the guarantees, then their assumptions, each once."""
        first = self.guarantees[0]
        lines = [f"Differential privacy, unit: one {first.unit}, {first.sampling} sampling"]
        lines += [f"  {guarantee}" for guarantee in self.guarantees]
        if self.examples is not None:
            lines += [f"  one example, {text}" for text in self.examples.in_words()]
        meanings = {**ADJACENCY_TEXT, **VIEW_TEXT}
        lines += [f"  {name}: {text}" for name, text in meanings.items()]
        return "\n".join([*lines, *(f"  - {sentence}" for sentence in self._sentences())])
