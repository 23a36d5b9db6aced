"""HTML of objects in notebooks."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return an HTML table; text is escaped."""

    def cells(tag: str, values: Sequence[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(v))}</{tag}>" for v in values) + "</tr>"

    body = "".join(cells("td", row) for row in rows)
    head = f"<thead>{cells('th', headings)}</thead>"
    return f"<table><caption>{escape(caption)}</caption>{head}<tbody>{body}</tbody></table>"


class DisplayedBar:
    """A bar below a notebook's cell, with the methods of `rich.progress.Progress` that runs use."""

    def __init__(self, title: str, total: int, words: str):
        self._title, self._total, self._completed, self._words = title, total, 0.0, words

    def start(self) -> None:
        """Show the bar."""
        from IPython.display import HTML, display

        self._html = HTML
        self._handle: Any = display(HTML(self._text()), display_id=True)

    def update(self, task: Any, *, completed: float | None = None, words: str | None = None):
        """Change the bar."""
        del task
        self._completed = self._completed if completed is None else completed
        self._words = self._words if words is None else words
        self._handle.update(self._html(self._text()))

    def stop(self) -> None:
        """Leave the bar as it is."""

    def _text(self) -> str:
        bar = f'<progress value="{self._completed}" max="{self._total}"></progress>'
        return f"{escape(self._title)} {bar} {self._completed:.0f}/{self._total} " + escape(
            self._words
        )


def details(summary: str, sentences: Iterable[str]) -> str:
    """Return an HTML list that opens on a click."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<details><summary>{escape(summary)}</summary><ul>{items}</ul></details>"


def number(value: Any) -> str:
    """Format a number with four significant digits, or the range of an array."""
    import numpy as np  # the command line shows a bar without it

    if np.ndim(value) == 0:
        return f"{value:.4g}"
    return f"{np.min(value):.4g} to {np.max(value):.4g}"
