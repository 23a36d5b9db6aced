"""Statistics of a population, and the columns of a table with the flags that make features."""

import math
import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjaxsim.data.arrays import SPLITS
from fedjaxsim.data.files import in_file
from fedjaxsim.data.population import Population
from fedjaxsim.data.table import (
    Roles,
    encodable,
    kind_of,
    missing_values,
    read_table,
    table_of,
)

if TYPE_CHECKING:
    from pyarrow import ChunkedArray

_PADDING = -1
_WHITE, _PIXELS, _SAMPLED = 0.75, 16, 1_000
"""Mean from which on pixels in [0, 1] are white paper, the fewest of an image, and rows read."""
_LISTED = 10
"""Most labels that are listed."""
TABLES = ("csv", "parquet")
"""Sources that are tables."""
_SHOWN = 3
"""Values of a text column that are shown."""


def skewness(values: np.ndarray) -> float:
    """Compute the third standardized moment (biased); 0 if all values are the same."""
    apart = values - values.mean()
    variance = np.mean(apart**2)
    return float(np.mean(apart**3) / variance**1.5) if variance > 0 else 0.0


def label_counts(population: Population, *splits: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels of a population, sorted, (c,), and their counts in some splits, (m, c).

    By default in all splits; the label −1 of tokens is padding and does not count.
    """
    labels = np.unique(_labels(population)[1])
    client, found = _labels(population, *splits)
    shape = (population.num_clients, len(labels))
    cells = client * len(labels) + np.searchsorted(labels, found)
    return labels, np.bincount(cells, minlength=math.prod(shape)).reshape(shape)


def _labels(population: Population, *splits: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the client and the value of every label in some splits, (k,) each, without padding."""
    y = population.fields.get("y")
    if y is None or y.dtype.kind not in "iu":
        raise ValueError("only integer labels 'y' can be counted")
    m, counts = population.num_clients, population.counts
    chosen = np.repeat(np.tile(np.isin(SPLITS, splits or SPLITS), m), counts.ravel())
    client = np.repeat(np.arange(m), counts.sum(axis=1))[chosen]
    labels = y[chosen]
    if y.ndim == 1:
        return client, labels
    real = labels != _PADDING
    return np.repeat(client, real.sum(axis=1)), labels[real]


def majority_accuracy(population: Population, split: str = "test", *, own: bool = False) -> float:
    """Compute the accuracy of always predicting the most frequent training label, or each its own.

    It is the mean over the clients with labels in the split, NaN if there is none; the smallest
    label wins a tie.
    """
    m = population.num_clients
    if own:
        labels, counts = label_counts(population, "train")
        predicted = labels[np.argmax(counts, axis=1)]
    else:
        labels, sizes = np.unique(_labels(population, "train")[1], return_counts=True)
        predicted = np.full(m, labels[np.argmax(sizes)])
    client, asked = _labels(population, split)
    total = np.bincount(client, minlength=m)
    hits = np.bincount(client, asked == predicted[client], m)
    return float(np.mean(hits[total > 0] / total[total > 0])) if total.any() else float("nan")


def between_clients(population: Population) -> float | None:
    """Compute the intraclass correlation ICC(1) of a numeric target, of training rows.

    With the mean squares MSB between and MSW within k clients it is (MSB − MSW) / (MSB + (n₀ − 1)
    MSW), n₀ = (N − Σ n²/N) / (k − 1) (Donner 1986): the share of the target's variance that lies
    between clients. It may be slightly negative. None if the target is not one number a row, names
    classes, or clients have one row each.
    """
    y, ranges = population.fields.get("y"), population.splits["train"]
    if y is None or y.ndim != 1 or "y" in population.categories:
        return None
    counts = ranges.count[ranges.count > 0]
    rows, k = int(counts.sum()), len(counts)
    if k < 2 or rows == k:
        return None
    values = y[ranges.all_rows()].astype(np.float64)
    values -= values.mean()
    client = np.repeat(np.arange(k), counts)
    means = np.bincount(client, values) / counts
    between = np.sum(counts * means**2) / (k - 1)
    within = np.sum((values - means[client]) ** 2) / (rows - k)
    usual = (rows - np.sum(counts.astype(np.float64) ** 2) / rows) / (k - 1)
    total = between + (usual - 1) * within
    return float((between - within) / total) if total > 0 else None


def white_paper(population: Population) -> str:
    """Return a sentence on images of dark ink on white paper; "" of other data."""
    x = population.fields.get("x")
    if x is None or x.dtype.kind != "f" or math.prod(x.shape[1:]) < _PIXELS:
        return ""
    some = x[:_SAMPLED]
    mean = float(some.mean())
    if mean < _WHITE or some.min() < 0 or some.max() > 1:
        return ""
    return (
        f"the mean of x is {mean:.2f}, as of images on white paper, 1: models learn the paper "
        "first, so invert it (--preprocess invert; fjs.data.invert)"
    )


def describe(population: Population) -> dict[str, Any]:
    """Return statistics of a population by name; None for one that does not apply.

    `rows_min`, `rows_median`, `rows_max` and `rows_skewness` are of all splits together;
    `majority_accuracy` and `own_majority_accuracy` are on test rows.
    """
    sizes = population.counts.sum(axis=1)
    found: dict[str, Any] = {
        "clients": population.num_clients,
        "rows": population.num_rows,
        **{f"rows_{split}": int(population.splits[split].count.sum()) for split in SPLITS},
        "rows_min": int(sizes.min()),
        "rows_median": float(np.median(sizes)),
        "rows_max": int(sizes.max()),
        "rows_skewness": skewness(sizes),
        "fields": {
            name: [str(values.dtype), *values.shape[1:]]
            for name, values in population.fields.items()
        },
        "labels": None,
        "majority_accuracy": None,
        "own_majority_accuracy": None,
        "between_clients": between_clients(population),
        "white_paper": white_paper(population) or None,
    }
    y = population.fields.get("y")
    if y is not None and y.dtype.kind in "iu":
        names = population.categories.get("y")
        labels, _ = label_counts(population)
        found["labels"] = [names[k] if names else int(k) for k in labels]
        if population.splits["test"].count.any():
            found["majority_accuracy"] = majority_accuracy(population)
            found["own_majority_accuracy"] = majority_accuracy(population, own=True)
    return found


def in_words(found: Mapping[str, Any]) -> str:
    """Format the statistics of `describe`, one line per fact."""
    splits = ", ".join(f"{name} {found[f'rows_{name}']}" for name in SPLITS)
    lines = [
        f"clients: {found['clients']}",
        f"rows: {found['rows']} ({splits})",
        f"rows per client: min {found['rows_min']}, median {found['rows_median']:g}, "
        f"max {found['rows_max']}, skewness {found['rows_skewness']:.2f}",
        *(
            f"{name}: {dtype}, {' × '.join(map(str, shape)) or 'one'} per row"
            for name, (dtype, *shape) in found["fields"].items()
        ),
    ]
    if found["labels"] is not None:
        labels = [readable(str(label)) for label in found["labels"]]
        if len(labels) > _LISTED:
            labels = [*labels[: _LISTED - 2], "…", labels[-1]]
        lines.append(f"labels: {len(found['labels'])} different: {', '.join(labels)}")
    if found["majority_accuracy"] is not None:
        lines.append(
            "test accuracy of always saying the most frequent label, mean over clients: "
            f"{found['majority_accuracy']:.3f} "
            f"(each client its own: {found['own_majority_accuracy']:.3f})"
        )
    if found["between_clients"] is not None:
        lines.append(
            f"variance of the target between clients: {found['between_clients']:.2f} of all "
            "(intraclass correlation of training rows, not private); the larger, the more personal "
            "models can help"
        )
    if found["white_paper"] is not None:
        lines.append(found["white_paper"])
    return "\n".join(lines)


def readable(name: str) -> str:
    """Quote a name that is blank or not printable."""
    return name if name.strip() and name.isprintable() else repr(name)


def columns_of(
    path: str | os.PathLike[str],
    arguments: Mapping[str, Any],
    scaled: Collection[str] | None = (),
) -> list[dict[str, Any]]:
    """Describe each column of a table: type, values, what is missing, how to use it.

    "values" are the smallest and the largest, or the first few of text; "flag" is what the column
    needs, or None. `arguments` are the reader's; `scaled` names columns with known ranges, None is
    all. All of it is read from the rows: nothing of it is private.
    """
    with in_file(path):
        table = table_of(read_table(path, arguments.get("client")))
    known = {name: value for name, value in arguments.items() if name in Roles._fields}
    roles = Roles(**{"client": None, **known})
    named: dict[str | None, str] = dict.fromkeys(roles.targets, "target")
    named |= {roles.client: "client", roles.split: "split", roles.x: "x"}
    named |= dict.fromkeys(roles.one_hot, "one-hot") | dict.fromkeys(roles.drop, "dropped")
    return [
        _facts(name, column, named.get(name, "feature"), scaled is None or name in scaled)
        for name, column in zip(table.column_names, table.columns, strict=True)
    ]


def _facts(name: str, column: "ChunkedArray", role: str, scaled: bool) -> dict[str, Any]:
    from pyarrow import types

    absent, kind = missing_values(column), kind_of(column)
    missing = int(absent.sum())
    ends: list[Any] = []
    if kind == "number":
        found = np.unique(column.to_numpy()[~absent].astype(np.float64))
        ends = [float(found[0]), float(found[-1])] if len(found) else []
    else:
        values = zip(column.to_pylist(), absent, strict=True)
        found = sorted({str(value) for value, gone in values if not gone})
        ends = found[:_SHOWN] if kind == "text" else []
    distinct = len(found)
    needed = None
    of_numbers = role == "feature" or (role == "target" and types.is_floating(column.type))
    if role == "feature" and (missing or distinct < 2):
        needed = f"--drop {name}"
    elif role == "feature" and kind in ("text", "other"):
        encodes = kind == "text" and encodable(distinct, len(column))
        needed = f"--{'one-hot' if encodes else 'drop'} {name}"
    elif of_numbers and not scaled and kind == "number" and max(map(abs, ends), default=0) > 1:
        needed = f"--range {name}=LOW:HIGH"
    return {
        "name": name,
        "role": role,
        "type": str(column.type),
        "values": ends,
        "distinct": distinct,
        "missing": missing,
        "flag": needed,
    }


def columns_in_words(columns: Sequence[Mapping[str, Any]]) -> str:
    """Format the columns as a table, and the flags to paste below it."""
    rows = [("column", "role", "type", "values", "distinct", "missing", "")]
    for each in columns:
        numbers = [f"{end:.6g}" for end in each["values"] if isinstance(end, float)]
        values = " to ".join(numbers) or ", ".join(readable(text) for text in each["values"])
        values += ", …" if not numbers and each["distinct"] > len(each["values"]) > 0 else ""
        facts = (each["type"], values, str(each["distinct"]), str(each["missing"]))
        rows.append((readable(each["name"]), each["role"], *facts, each["flag"] or ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    flags: dict[str, list[str]] = {}
    for each in columns:
        name, _, of = (each["flag"] or "").partition(" ")
        if name:
            flags.setdefault(name, []).append(of)
    pasted = [f"{name} {','.join(of)}" for name, of in flags.items() if name != "--range"]
    pasted += [f"--range {of}" for of in flags.get("--range", ())]
    if pasted:
        lines.append(f"flags: {' '.join(pasted)}")
    if "--range" in flags:
        lines.append("ranges must be public knowledge: those above are read from the rows")
    return "\n".join(lines)
