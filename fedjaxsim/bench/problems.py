"""Synthetic data of the workloads: what they hold is noise, only shapes and sizes matter."""

from collections.abc import Sequence

import numpy as np

from fedjaxsim.data.population import Population, consecutive

FEMNIST_WRITERS = 206
FEMNIST_CLASSES = 62
IMAGE = (28, 28)


def classification(
    train: np.ndarray, test: np.ndarray, shape: Sequence[int], num_classes: int
) -> Population:
    """Random examples with random labels.

    Args:
      train: training rows of each client, (m,).
      test: test rows, (m,).
      shape: of one example.
      num_classes: c.
    """
    rng = np.random.default_rng(0)
    rows = int(train.sum() + test.sum())
    fields = {
        "x": rng.standard_normal((rows, *shape), dtype=np.float32),
        "y": rng.integers(0, num_classes, rows, dtype=np.int32),
    }
    splits = consecutive(train, np.zeros_like(train), test)
    return Population(fields, splits, np.arange(len(train)).astype(str))


def texts(clients: int, train: int, test: int, length: int, tokens: int) -> Population:
    """Random tokens, each with a label, (rows, L) for every client.

    Args:
      clients: m.
      train: training rows of each.
      test: test rows.
      length: L.
      tokens: how many different ones there are, and labels.
    """
    rng, shape = np.random.default_rng(0), (clients * (train + test), length)
    fields = {
        "x": rng.integers(0, tokens, shape, dtype=np.uint8),
        "y": rng.integers(0, tokens, shape, dtype=np.int32),
    }
    rows = np.full(clients, train), np.zeros(clients, int), np.full(clients, test)
    return Population(fields, consecutive(*rows), np.arange(clients).astype(str))


def equal_clients(
    clients: int, train: int, test: int, shape: Sequence[int], num_classes: int
) -> Population:
    """As `classification`, with as many rows for every client."""
    return classification(np.full(clients, train), np.full(clients, test), shape, num_classes)


def femnist_counts(clients: int = FEMNIST_WRITERS) -> tuple[np.ndarray, np.ndarray]:
    """Training and test rows of clients like FEMNIST's writers, each (m,).

    5 to 69 images each, 30 on average, in the order of no size; a fifth of them is for testing.

    Args:
      clients: m.
    """
    shares = (np.arange(clients) + 0.5) / clients
    # With this power the mean is that of the 206 writers, 30.3.
    images = np.random.default_rng(0).permutation(5 + np.floor(65 * shares**1.5).astype(int))
    test = np.floor(0.2 * images + 0.5).astype(int)
    return images - test, test
