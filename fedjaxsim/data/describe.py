"""Who has what: numbers of rows and labels of the clients, and what a constant answer scores."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjaxsim.data.population import SPLITS, Population

_PADDING = -1
_LISTED = 10
"""The most labels that are listed."""


def rows_per_client(population: Population) -> np.ndarray:
    """The rows of each client in all splits, (m,)."""
    return np.sum([population.splits[split].count for split in SPLITS], axis=0)


def skewness(values: np.ndarray) -> float:
    """The third standardized moment, as of a population; 0 where all values are the same."""
    apart = values - values.mean()
    variance = np.mean(apart**2)
    return float(np.mean(apart**3) / variance**1.5) if variance > 0 else 0.0


def label_counts(population: Population, *splits: str) -> tuple[np.ndarray, np.ndarray]:
    """How often each client has each label that occurs anywhere, in some splits or in all.

    Of labels per token all count but −1, which marks padding.

    Returns:
        The labels in sorted order, (c,), and the counts, (m, c).

    Raises:
        ValueError: there are no integer labels "y".
    """
    y = _labels(population)
    labels, index = np.unique(y, return_inverse=True)
    index = index.reshape(y.shape)
    counts = np.zeros((population.num_clients, len(labels)), np.int64)
    for split in splits or SPLITS:
        client, own = _of_clients(population, split, index)
        pairs = np.bincount(client * len(labels) + own, minlength=counts.size)
        counts += pairs.reshape(counts.shape)
    real = _real(labels, y)
    return labels[real], counts[:, real]


def _labels(population: Population) -> np.ndarray:
    y = population.fields.get("y")
    if y is None or y.dtype.kind not in "iu":
        raise ValueError("only integer labels 'y' can be counted")
    return y


def _of_clients(
    population: Population, split: str, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The clients and the values of all labels in a split, (k,) each; values are like "y"."""
    ranges = population.splits[split]
    client, own = ranges.owners(), values[ranges.all_rows()]
    return np.repeat(client, own.size // max(1, len(own))), own.ravel()


def _real(labels: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which labels, (k,), are no padding: among labels per token, y (N, L), there may be some."""
    return np.full(len(labels), True) if y.ndim == 1 else labels != _PADDING


def majority_accuracy(population: Population, split: str = "test", *, own: bool = False) -> float:
    """The accuracy of always saying the label that is most frequent in the training rows.

    Args:
        population: with integer labels.
        split: whose rows are predicted.
        own: whether each client says the most frequent label of its own training rows; by default
            all say that of all clients together. The smallest label wins a tie.

    Returns:
        The mean over the clients that have labels in the split; NaN where none has.

    Raises:
        ValueError: as `label_counts`.
    """
    y, m = _labels(population), population.num_clients
    if own:
        labels, counts = label_counts(population, "train")
        said = labels[np.argmax(counts, axis=1)]
    else:
        _, train = _of_clients(population, "train", y)
        labels, sizes = np.unique(train[_real(train, y)], return_counts=True)
        said = np.full(m, labels[np.argmax(sizes)])
    client, asked = _of_clients(population, split, y)
    client, asked = (array[_real(asked, y)] for array in (client, asked))
    total = np.bincount(client, minlength=m)
    hits = np.bincount(client, asked == said[client], m)
    return float(np.mean(hits[total > 0] / total[total > 0])) if total.any() else float("nan")


def describe(population: Population) -> dict[str, Any]:
    """Numbers that say what a population is like, by name; None where one does not apply.

    `rows_…` are of all splits together; the accuracies are those of `majority_accuracy` on test
    rows, the second with each client's own label.
    """
    sizes = rows_per_client(population)
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
    """Format the numbers that `describe` returns, one line per fact."""
    sizes = (
        f"min {found['rows_min']}, median {found['rows_median']:g}, max {found['rows_max']}, "
        f"skewness {found['rows_skewness']:.2f}"
    )
    splits = ", ".join(
        f"{name} {found[f'rows_{name}']}" for name in ("train", "validation", "test")
    )
    lines = [
        f"clients: {found['clients']}",
        f"rows: {found['rows']} ({splits})",
        f"rows per client: {sizes}",
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
    return "\n".join(lines)


def readable(name: str) -> str:
    """Quote a name that is blank or not printable."""
    return name if name.strip() and name.isprintable() else repr(name)
