"""The papers' loops in plain numpy, as their authors write them: one client after the other.

PMTL on softmax regression is below; PP-SGD is that of `benchmarks/ppsgd_grid.py`. `compare.py`
starts this file.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import child
import numpy as np


class Settings(NamedTuple):
    """Settings of PMTL, named as in `fedjaxsim.Hyperparameters`, and the batch size."""

    learning_rate: float = child.LEARNING_RATE
    lam: float = child.LAM
    clip_norm: float = child.CLIP
    noise_multiplier: float = child.NOISE_MULTIPLIER
    sampling_rate: float = 1.0
    batch: int = child.BATCH


class PMTL:
    """PMTL (Hu, Wu, Smith 2023, Algorithm 1) on softmax regression with a bias, one epoch a round.

    Args:
      train: each client's features (n_k, d) and labels (n_k,).
      classes: c.
      settings: of the algorithm.
      rng: what cohorts, orders of rows and noise are drawn from.

    Attributes:
      shared: w̃, (d + 1, c); the last row is the bias, as of all models here.
      personal: w_k of all clients, (m, d + 1, c).
    """

    def __init__(
        self,
        train: list[tuple[np.ndarray, np.ndarray]],
        classes: int,
        settings: Settings,
        rng: np.random.Generator,
    ):
        self.settings, self.rng = settings, rng
        self.x = [np.concatenate([x, np.ones_like(x[:, :1])], axis=1) for x, _ in train]
        self.y = [y for _, y in train]
        shape = (self.x[0].shape[1], classes)
        self.shared = np.zeros(shape, self.x[0].dtype)
        self.personal = np.zeros((len(train), *shape), self.x[0].dtype)

    def run(self, rounds: int) -> None:
        """Runs rounds."""
        for _ in range(rounds):
            self._round()

    def correct(self, client: int, x: np.ndarray, y: np.ndarray) -> int:
        """How many rows, (n, d) and (n,), a client's own model gets right."""
        w = self.personal[client]
        return int(np.sum(np.argmax(x @ w[:-1] + w[-1], axis=1) == y))

    def _round(self) -> None:
        s, m = self.settings, len(self.personal)
        total = np.zeros_like(self.shared)
        for k in np.flatnonzero(self.rng.random(m) < s.sampling_rate).tolist():
            w = self.personal[k].copy()
            for rows in self._batches(k):
                gradient = _gradient(w, self.x[k][rows], self.y[k][rows])
                w -= s.learning_rate * (gradient + s.lam * (w - self.shared))
            update = w - self.personal[k]
            self.personal[k] = w
            total += update / max(1.0, float(np.linalg.norm(update)) / s.clip_norm)
        noise = self.rng.standard_normal(total.shape, dtype=total.dtype)
        total += s.noise_multiplier * s.clip_norm * noise
        self.shared += total / (s.sampling_rate * m)

    def _batches(self, k: int) -> Iterator[np.ndarray]:
        order = self.rng.permutation(len(self.y[k]))
        for start in range(0, len(order), self.settings.batch):
            yield order[start : start + self.settings.batch]


def _gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of the mean cross-entropy of softmax(x w); x (b, d + 1) ends with ones."""
    logits = x @ w
    share = np.exp(logits - logits.max(axis=1, keepdims=True))
    share /= share.sum(axis=1, keepdims=True)
    share[np.arange(len(y)), y] -= 1
    return x.T @ share / len(y)


def pmtl(args) -> None:
    """PMTL on FEMNIST; its accuracy is over the test rows of all clients, as with the others."""
    clients = child.read_clients(args.data)
    settings = Settings(sampling_rate=child.COHORT / len(clients.train))
    loop = PMTL(clients.train, child.CLASSES, settings, np.random.default_rng(args.seed))
    warm = child.seconds(lambda: loop.run(args.warm))
    timed = child.seconds(lambda: loop.run(args.rounds))
    correct = [loop.correct(k, x, y) for k, (x, y) in enumerate(clients.test)]
    accuracy = sum(correct) / len(clients.all_tests()[1])
    child.emit(child.report(args, timed, warm, {"accuracy": accuracy}, {}))


def ppsgd(args) -> None:
    """PP-SGD on its synthetic problem."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import ppsgd_grid

    _, theta = ppsgd_grid.make_simulation()
    loop = ppsgd_grid.InNumpy(theta, ppsgd_grid.SINGLE, np.random.default_rng(args.seed))
    warm = child.seconds(lambda: loop.run(args.warm))
    risks = []
    timed = child.seconds(lambda: risks.append(loop.run(args.rounds)))
    child.emit(child.report(args, timed, warm, {"excess_risk": risks[0]}, {}))


if __name__ == "__main__":
    arguments = child.parse()
    {"pmtl": pmtl, "ppsgd": ppsgd}[arguments.what](arguments)
