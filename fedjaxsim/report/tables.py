"""A table of text, as CSV, LaTeX (booktabs) or HTML."""

import html
import re
from collections.abc import Sequence
from typing import NamedTuple

from fedjaxsim.report.files import csv_text

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "∞": r"$\infty$", "≤": r"$\le$", "–": "--", "−": "$-$", "ε": r"$\varepsilon$",
    "δ": r"$\delta$", "λ": r"$\lambda$", "η": r"$\eta$", "μ": r"$\mu$", "α": r"$\alpha$",
}  # fmt: skip
_NEGATIVE = re.compile(r"(?<!\S)-(\d\S*)")
"""A negative number, whose hyphen LaTeX would print as such."""


class TextTable(NamedTuple):
    """Headings and rows of text; the first `left` columns are words, the others numbers."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1

    @property
    def csv(self) -> str:
        """The table as CSV."""
        lines = (self.headings, *self.rows)
        return csv_text([[" ".join(cell.split()) for cell in line] for line in lines])

    @property
    def latex(self) -> str:
        """The table for LaTeX with the package booktabs."""
        columns = "l" * self.left + "r" * (len(self.headings) - self.left)
        head, *body = (
            " & ".join(row) + r" \\"
            for row in (map(_escaped, self.headings), *map(self._latex_row, self.rows))
        )
        lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body]
        return "\n".join([f"% {' '.join(self.title.split())}", *lines, r"\bottomrule",
                          r"\end{tabular}", ""])  # fmt: skip

    def _latex_row(self, row: Sequence[str]) -> list[str]:
        numbers = [_NEGATIVE.sub(r"$-\1$", _escaped(text)) for text in row[self.left :]]
        return [*map(_escaped, row[: self.left]), *numbers]

    def html(self, links: dict[str, str] | None = None) -> str:
        """Return the table as an element of HTML; `links` has addresses by the text of a cell."""
        addresses = links or {}

        def cell(text: str, place: int) -> str:
            shown = html.escape(text)
            if place == 0 and text in addresses:
                shown = f'<a href="{html.escape(addresses[text])}">{shown}</a>'
            kind = "" if place < self.left else ' class="n"'
            return f"<td{kind}>{shown}</td>"

        heads = "".join(f"<th>{html.escape(text)}</th>" for text in self.headings)
        rows = ["".join(cell(text, place) for place, text in enumerate(row)) for row in self.rows]
        body = "\n".join(f"<tr>{row}</tr>" for row in rows)
        return (
            f"<table>\n<caption>{html.escape(self.title)}</caption>\n"
            f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
        )


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))
