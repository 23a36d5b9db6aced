"""HTML pages, rendered from `templates/`: one file each, without scripts or network access."""

import base64
import functools
import shlex
from typing import Any

import jinja2

from fedjaxsim.report.progress import bytes_text, number

_PIXELS = slice(16, 20)
"""The bytes of a PNG file that hold its width."""


def metric_text(value: float | None) -> str:
    """Format a metric with four decimals, or four digits where decimals would hide it."""
    shows = value is not None and (value == 0 or 0.01 <= abs(value) < 100)
    return f"{value:.4f}" if shows else number(value)


def seconds_text(seconds: float | None) -> str:
    """Format a time in seconds, a dash for None."""
    return "–" if seconds is None else f"{number(seconds)} s"


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedjaxsim.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "base64": lambda content: base64.b64encode(content).decode(),
        "bytes": bytes_text,
        "command": shlex.join,
        "number": number,
        "pixels": lambda png: int.from_bytes(png[_PIXELS]),
        "seconds": seconds_text,
        "transpose": lambda rows: list(zip(*rows, strict=True)),
    }
    return environment


def render(template: str, **content: Any) -> bytes:
    """Render `templates/{template}.html.jinja`, with all text escaped."""
    page = _environment().get_template(f"{template}.html.jinja").render(content)
    return page.encode(errors="replace")
