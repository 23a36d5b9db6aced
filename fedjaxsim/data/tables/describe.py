"""Statistics of a population, and the columns of a table with the flags that make features."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjaxsim.data.arrays import SPLITS, merged_integers, to_float32
from fedjaxsim.data.population import Population
from fedjaxsim.data.tables.table import (
    Roles,
    check_names,
    encodable,
    kind_of,
    missing_values,
    odd_cells,
    table_of,
    texts,
    warn_of_sentinel,
)
from fedjaxsim.data.transforms import BY_NUMBER, clipped_shares, require_columns
from fedjaxsim.data.windows import shared_windows
from fedjaxsim.factories import taken_by

if TYPE_CHECKING:
    from pyarrow import ChunkedArray

_PADDING = -1
_LISTED = 10
"""Most labels that are listed."""
_FEW = 20
"""Most integers from 0 on that are taken for classes."""
_LEAK = 0.01
"""Share of test rows with raw data of training rows from which on it is said."""
_SHOWN = 3
"""Values of a text column that are shown."""


def describe(population: Population) -> dict[str, Any]:
    """Return a dict of a population's statistics; None for one that does not apply.

    `rows_min`, `rows_median`, `rows_max` and `rows_skewness` count all splits together.
    """
    sizes = population.counts.sum(axis=1)
    statistics: dict[str, Any] = {
        "clients": population.num_clients,
        "rows": population.num_rows,
        **{f"rows_{split}": int(population.splits[split].count.sum()) for split in SPLITS},
        "rows_min": int(sizes.min()),
        "rows_median": float(np.median(sizes)),
        "rows_max": int(sizes.max()),
        "rows_skewness": _skewness(sizes),
        "fields": {
            name: [str(values.dtype), *values.shape[1:]]
            for name, values in population.fields.items()
        },
        "pictures": _ends_of_pictures(population),
        "labels": None,
        "needs_loss": _are_numbers(population),
        "clipped": clipped_shares(population),
        "between_clients": between_clients(population),
        "shared_windows": shared_windows(population),
    }
    y = population.fields.get("y")
    if y is not None and y.dtype.kind in "iu":
        names = population.categories.get("y")
        labels = np.unique(y if y.ndim == 1 else y[y != _PADDING])  # one for each token
        statistics["labels"] = [names[k] if names else int(k) for k in labels]
    return statistics


def _skewness(sizes: np.ndarray) -> float:
    """Return the third standardized moment; `scipy.stats` takes half a second to import."""
    centred = sizes - np.mean(sizes)
    return float(np.mean(centred**3) / np.std(sizes) ** 3) if np.ptp(sizes) else 0.0


def _ends_of_pictures(population: Population) -> list[float] | None:
    """Return the smallest and the largest number of pictures x, (N, height, width, …)."""
    x = population.fields.get("x")
    return None if x is None or x.ndim < 3 else [x.min().item(), x.max().item()]


def between_clients(population: Population) -> float | None:
    """Compute the intraclass correlation ICC(1) of the target, of training rows.

    It is the share of the target's variance between clients, in one-way analysis of variance with
    n₀ = (N − Σ n²/N) / (k − 1) rows a client (Donner 1986), and may be slightly negative. For
    classes, as text or 0 to at most 19, it is the variance of their indicators together.

    Returns:
      The correlation; None without a target of one number a row, or if no client has two rows.
    """
    y, ranges = population.fields.get("y"), population.splits["train"]
    counts = ranges.count.astype(np.float64)
    rows, clients = int(counts.sum()), len(counts)
    if y is None or y.ndim != 1 or clients < 2 or rows == clients:
        return None
    values, client = y[ranges.all_rows()], np.repeat(np.arange(clients), ranges.count)
    numbers = _are_numbers(population)
    if numbers:
        values = np.array(population.categories["y"], np.float64)[values]
    if not numbers and ("y" in population.categories or _are_classes(values)):
        classes = int(values.max()) + 1
        cells = np.bincount(client * classes + values, minlength=clients * classes)
        of_client = cells.reshape(clients, classes).astype(np.float64)
        centre = np.sum(of_client.sum(axis=0) ** 2) / rows
        total, between = rows - centre, np.sum(of_client**2 / counts[:, None]) - centre
    else:
        centred = values.astype(np.float64) - values.mean(dtype=np.float64)
        total = np.sum(centred**2)
        between = np.sum(np.bincount(client, centred) ** 2 / counts)
    across, within = between / (clients - 1), (total - between) / (rows - clients)
    usual = (rows - np.sum(counts**2) / rows) / (clients - 1)
    scale = across + (usual - 1) * within
    return float((across - within) / scale) if scale > 0 else None


def _are_numbers(population: Population) -> bool:
    """Return whether labels are named by whole numbers, more than classes usually are."""
    names = population.categories.get("y", ())
    return len(names) > _FEW and BY_NUMBER in population.public


def _are_classes(values: np.ndarray) -> bool:
    """Return whether labels are integers from 0 on, few of them."""
    from_zero = values.dtype.kind in "iu" and values.min() >= 0 and values.max() < _FEW
    return bool(from_zero and len(np.unique(values)) == values.max() + 1)


def in_words(statistics: Mapping[str, Any]) -> str:
    """Format the statistics of `describe`, one line per fact."""
    splits = ", ".join(f"{name} {statistics[f'rows_{name}']}" for name in SPLITS)
    lines = [
        f"clients: {statistics['clients']}",
        f"rows: {statistics['rows']} ({splits})",
        f"rows per client: min {statistics['rows_min']}, median {statistics['rows_median']:g}, "
        f"max {statistics['rows_max']}, skewness {statistics['rows_skewness']:.2f}",
        *(
            f"{name}: {dtype}, {' × '.join(map(str, shape)) or 'one'} per row"
            for name, (dtype, *shape) in statistics["fields"].items()
        ),
    ]
    if statistics["pictures"] is not None:
        low, high = statistics["pictures"]
        lines.append(f"pixels of x: {low:.4g} to {high:.4g} (readers divide bytes by 255)")
    if statistics["labels"] is not None:
        labels = [readable(str(label)) for label in statistics["labels"]]
        if len(labels) > _LISTED:
            labels = [*labels[: _LISTED - 2], "…", labels[-1]]
        lines.append(f"labels: {len(statistics['labels'])} different: {', '.join(labels)}")
    if statistics["needs_loss"]:
        lines.append("a run asks for --loss: squared (numbers), poisson (counts) or softmax")
    if statistics["between_clients"] is not None:
        lines.append(
            f"variance of the target between clients: {statistics['between_clients']:.2f} of all "
            "(ICC); the larger, the more personal models can help"
        )
    if (statistics["shared_windows"] or 0) >= _LEAK:
        lines.append(
            f"{statistics['shared_windows']:.0%} of test rows share half of x with training rows, "
            "as overlapping windows do: --split-by time keeps them apart"
        )
    if statistics["clipped"]:
        lines.append(clipped_in_words(statistics["clipped"]))
    return "\n".join(lines)


def clipped_in_words(shares: Mapping[str, float]) -> str:
    """Format the shares of rows beyond their column's range, by column."""
    texts = [f"{readable(name)} {share:.2%}" for name, share in shares.items()]
    return f"rows clipped to the range of a column: {', '.join(texts)}"


def ranges_in_words(population: Population) -> str:
    """Format the ranges by which columns were scaled."""
    return ", ".join(
        f"{readable(name)} {centre - abs(half_range):.4g} to {centre + abs(half_range):.4g}"
        for columns in population.columns.values()
        for name, centre, half_range in zip(
            columns.names, columns.centre, columns.half_range, strict=True
        )
        if (centre, half_range) != (0, 1)
    )


def readable(name: str) -> str:
    """Quote a name that is blank, not printable, or begins or ends with a space."""
    return name if name and name == name.strip() and name.isprintable() else repr(name)


def columns_of(
    frame: Any,
    arguments: Mapping[str, Any],
    scaled: Collection[str] = (),
    *,
    all_scaled: bool = False,
) -> list[dict[str, Any]]:
    """Describe each column of a data frame: type, values, what is missing, how to use it.

    "values" are the smallest and the largest, or the first few of text; "flag" is what the column
    needs, or None. `arguments` are the reader's; `scaled` names columns with known ranges, which
    all have if `all_scaled`. All of it is read from the rows: nothing of it is private.
    """
    names = taken_by(Roles)
    roles = Roles(**{name: value for name, value in arguments.items() if name in names})
    table = table_of(frame)
    roles = roles.with_split(table.column_names, lambda name: texts(table[name]))
    check_names(table.column_names, len(table), roles)
    named: dict[str | None, str] = dict.fromkeys(roles.targets, "target")
    named |= {roles.client: "client", roles.split: "split", roles.x: "x"}
    named |= {roles.exposure: "exposure", roles.row_weights: "row-weights"}
    named |= dict.fromkeys(roles.one_hot, "one-hot") | dict.fromkeys(roles.drop, "dropped")
    roles_by_name = {name: named.get(name, "feature") for name in table.column_names}
    encoded = [name for name in scaled if "=" in name]
    numbers = [name for name, role in roles_by_name.items() if role in ("feature", "target")]
    require_columns(scaled, [*numbers, *encoded])
    return [
        _facts(name, column, roles_by_name[name], all_scaled or name in scaled)
        for name, column in zip(table.column_names, table.columns, strict=True)
    ]


def _facts(name: str, column: "ChunkedArray", role: str, scaled: bool) -> dict[str, Any]:
    from pyarrow import types

    absent, kind = missing_values(column), kind_of(column.type)
    no_quantity = False
    if kind == "number":
        numbers = column.to_numpy()[~absent].astype(np.float64)
        if role == "feature":
            warn_of_sentinel(name, to_float32(numbers))
            no_quantity = names_rows(column, numbers)
        distinct_values = np.unique(numbers)
        shown_values = (
            [distinct_values[0].item(), distinct_values[-1].item()] if len(distinct_values) else []
        )
    else:
        distinct_values = np.unique(texts(column)[~absent])
        shown_values = distinct_values[: _SHOWN if kind == "text" else 0].tolist()
    missing, distinct, needed = int(absent.sum()), len(distinct_values), None
    of_numbers = role == "feature" or (role == "target" and types.is_floating(column.type))
    if role == "feature" and kind == "text" and (odd := odd_cells(column)):
        needed = f"--missing {shlex.quote(','.join(sorted(odd)))}"
    elif role == "feature" and (missing or distinct < 2 or no_quantity):
        needed = f"--drop {shlex.quote(name)}"
    elif role == "feature" and kind in ("text", "other"):
        encodes = kind == "text" and encodable(distinct, len(column))
        needed = f"--{'one-hot' if encodes else 'drop'} {shlex.quote(name)}"
    elif (
        of_numbers
        and not scaled
        and kind == "number"
        and (role == "feature" or max(map(abs, shown_values), default=0) > 1)  # or no default fits
    ):
        needed = f"--range {shlex.quote(f'{name}=LOW:HIGH')}"
    return {
        "name": name, "role": role, "type": str(column.type), "values": shown_values,
        "distinct": distinct, "missing": missing, "flag": needed,
    }  # fmt: skip


def names_rows(column: "ChunkedArray", numbers: np.ndarray) -> bool:
    """Return whether numbers count rows, perhaps with gaps, or are long ids."""
    are_whole = len(numbers) > 2 and numbers[0] >= 0 and np.all(numbers % 1 == 0)
    counts = are_whole and numbers[-1] <= 2 * len(numbers) and np.all(np.diff(numbers) >= 1)
    return bool(counts) or merged_integers(column.to_numpy()) is not None


def _flag_of(column: Mapping[str, Any]) -> str:
    """Return the name of the flag that a column needs; "" for none."""
    return (column["flag"] or "").partition(" ")[0]


def columns_in_words(columns: Sequence[Mapping[str, Any]]) -> str:
    """Format the columns as a table, and the flags to paste below it."""
    rows = [("column", "role", "type", "values", "distinct", "missing", "")]
    for details in columns:
        numbers = [f"{end:.6g}" for end in details["values"] if isinstance(end, float)]
        values = " to ".join(numbers) or ", ".join(map(readable, details["values"]))
        values += ", …" if not numbers and details["distinct"] > len(details["values"]) > 0 else ""
        facts = (details["type"], values, str(details["distinct"]), str(details["missing"]))
        rows.append((readable(details["name"]), details["role"], *facts, details["flag"] or ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    needed = [(_flag_of(details), details["name"]) for details in columns if details["flag"]]
    ranges = [f"{column}=LOW:HIGH" for name, column in needed if name == "--range"]
    pasted = [f"--range {shlex.quote(text)}" for text in ranges]
    cells = {
        details["flag"].split(" ", 1)[1] for details in columns if _flag_of(details) == "--missing"
    }
    pasted += [f"--missing {','.join(sorted(cells))} --drop-missing"] if cells else []
    for flag in ("--drop", "--one-hot"):
        if of := [column for name, column in needed if name == flag]:
            pasted.insert(0, f"{flag} {shlex.quote(','.join(of))}")
    if pasted:
        lines.append(f"flags: {' '.join(pasted)}")
    if any(details["missing"] for details in columns if details["role"] == "feature"):
        lines.append("rows with missing values can be left out instead: --drop-missing")
    if any(name == "--range" for name, _ in needed):
        lines.append("ranges must be public knowledge: those above are read from the rows")
    return "\n".join(lines)
