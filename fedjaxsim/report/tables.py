"""Tables on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

import rich.box
from rich.console import JustifyMethod
from rich.table import Table

from fedjaxsim.report.progress import print_whole


def print_rows(
    rows: Sequence[Mapping[str, str]],
    title: str | None = None,
    *,
    justify: JustifyMethod = "right",
    **looks: Any,
) -> None:
    """Prints a table, as wide as it is where there is no terminal to fit into, in a log say.

    Args:
      rows: texts by heading, at least one row, all with the same headings.
      title: above the table.
      justify: of all columns but the first.
      looks: of the table, as rich's.
    """
    table = Table(
        title=title, title_justify="left", box=rich.box.SIMPLE_HEAD, show_edge=False, **looks
    )
    for index, heading in enumerate(rows[0]):
        table.add_column(heading, justify=justify if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*row.values())
    print_whole(table)
