"""HTML of objects in notebooks."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return an HTML table; text is escaped."""

    def cells(tag: str, values: Sequence[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(v))}</{tag}>" for v in values) + "</tr>"

    body = "".join(cells("td", row) for row in rows)
    head = f"<thead>{cells('th', headings)}</thead>"
    return f"<table><caption>{escape(caption)}</caption>{head}<tbody>{body}</tbody></table>"


def details(summary: str, sentences: Iterable[str]) -> str:
    """Return an HTML list that opens on a click."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<details><summary>{escape(summary)}</summary><ul>{items}</ul></details>"


def number(value: Any) -> str:
    """Format a number with four significant digits, or the range of an array."""
    if np.ndim(value) == 0:
        return f"{value:.4g}"
    return f"{np.min(value):.4g} to {np.max(value):.4g}"
