# pyright: reportMissingImports=false
"""One small network in torch and in jax, and a run of our algorithms, to compare with other code.

`side_pfllib.py` and `side_authors.py` compare step by step, in float64. Both sides start from the
same parameters and read the same minibatches of four clients in the same order. Printed is the
largest difference of a parameter after the last round, relative to the largest change of a
parameter since the start.
"""

import sys
import types
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import fedjaxsim as fjs
from fedjaxsim.algorithm import Context
from fedjaxsim.data.minibatches import Batch
from fedjaxsim.models.model import Model
from fedjaxsim.tasks import softmax

CLIENTS, ROWS, SIZE, FEATURES, HIDDEN, CLASSES = 4, 16, 4, 5, 4, 3
COHORTS = ([0, 1], [2, 3], [1, 2], [0, 3], [1, 3])
ALL = ([0, 1, 2, 3],) * 4
RATE, SERVER_RATE, EPOCHS = 0.3, 0.7, 2
Rows = list[tuple[torch.Tensor, torch.Tensor]]


class Base(torch.nn.Linear):
    """The hidden layer, with tanh."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the representation, (b, h)."""
        return torch.tanh(super().forward(x))


class Normed(Base):
    """The hidden layer with a normalization."""

    def __init__(self, *args: int):
        super().__init__(*args)
        self.bn = torch.nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the representation, (b, h)."""
        return torch.tanh(self.bn(torch.nn.Linear.forward(self, x)))


class Net(torch.nn.Module):
    """A hidden layer and a head, by the names that PFLlib reads."""

    def __init__(self, base: type[Base] = Base):
        super().__init__()
        torch.manual_seed(0)
        self.base = base(FEATURES, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (b, c)."""
        return self.head(self.base(x))


def arrays(net: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return parameters by name."""
    return {name: value.detach().numpy().copy() for name, value in net.named_parameters()}


def task_of(net: torch.nn.Module) -> fjs.Task:
    """Return the same network as a task, started at the same parameters."""
    start = {name: jnp.asarray(value) for name, value in arrays(net).items()}

    def represent(params, x):
        hidden = x @ params["base.weight"].T + params["base.bias"]
        if "base.bn.weight" in params:
            hidden = jax.nn.standardize(hidden, epsilon=1e-5)
            hidden = hidden * params["base.bn.weight"] + params["base.bn.bias"]
        return jnp.tanh(hidden)

    def apply(params, x):
        return represent(params, x) @ params["head.weight"].T + params["head.bias"]

    return softmax(Model(lambda key: start, apply, "head", None, represent), CLASSES)


def batch_of(rows: Rows) -> Batch:
    """Return all rows of a client."""
    x, y = (jnp.asarray(torch.stack(part).numpy()) for part in zip(*rows, strict=True))
    return Batch({"x": x, "y": y}, jnp.ones(len(y)))


class View:
    """One client's minibatches, in their order, for an algorithm's `client`.

    Args:
      rows: all rows.
      size: of a minibatch.
      epochs: of a round.
    """

    generates, count = False, jnp.int32(ROWS)
    minibatches = SimpleNamespace(steps=None, size=SIZE)

    def __init__(self, rows: Batch, size: int, epochs: int):
        self.rows, self.steps = rows, ROWS // size * epochs

        def cut(leaf):
            parts = leaf.reshape(-1, size, *leaf.shape[1:])
            return jnp.concatenate([parts] * epochs)

        self.parts = jax.tree.map(cut, rows)

    def fold(self, step, carry):
        """Fold over the round's minibatches."""
        return jax.lax.scan(lambda carry, batch: (step(carry, batch), None), carry, self.parts)[0]

    def full_pass(self, step, carry):
        """Fold over all rows."""
        return step(carry, self.rows)

    def num_steps(self):
        """Return the number of minibatches of a round."""
        return jnp.int32(self.steps)

    def batch_shapes(self):
        """Return the shapes of a batch."""
        return self.rows


CONTEXT = Context(np.int32(0), None, np.int32(0), CLIENTS, np.ones(()))  # type: ignore


def client_of(algorithm, size=SIZE, epochs=EPOCHS):
    """Return an algorithm's compiled `client`, of rows and a dict of hyperparameters."""

    def client(shared, personal, rows, hparams):
        view: Any = View(rows, size, epochs)
        return algorithm.client(shared, personal, view, SimpleNamespace(**hparams), CONTEXT)

    return jax.jit(client)


def ours(algorithm, clients, cohorts, size=SIZE, epochs=EPOCHS, server_rate=None, **values):
    """Run our algorithm without a mechanism: releases are means of messages.

    Returns:
      The server state, all personal states, and the parameters that clients predict with.
    """
    values = {"learning_rate": RATE, "server_learning_rate": 1.0, "envelope_rate": 0.5} | values
    hparams: Any = SimpleNamespace(**values, sampling_rate=len(cohorts[0]) / CLIENTS)
    shared, personal = algorithm.init(jax.random.key(0), hparams)
    personal, client = [personal] * CLIENTS, client_of(algorithm, size, epochs)
    for round_, cohort in enumerate(cohorts):
        if server_rate is not None:
            hparams.server_learning_rate = server_rate[round_]
        messages = []
        for k in cohort:
            rows = batch_of(clients[k])
            personal[k], message, _ = client(shared, personal[k], rows, values)
            messages.append(message)
        release = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *messages)
        shared = algorithm.server(shared, release, hparams, round_)
    predicted = [algorithm.predict(shared, one, hparams, 0) for one in personal]
    return shared, personal, predicted


def difference(found, expected, start) -> float:
    """Return the largest difference of parameters, relative to the largest change since `start`."""
    names = [name for name in expected if found.get(name) is not None]
    assert names
    change = max(np.max(np.abs(expected[name] - start[name])) for name in names)
    return float(max(np.max(np.abs(found[name] - expected[name])) for name in names) / change)


def stub(name: str, **attributes: Any) -> None:
    """Put an empty module in the place of one that is not needed."""
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(attributes)


def report(name: str, *values: float, of: str = "w") -> None:
    """Print a row of the table."""
    print(f"| {name} | {', '.join(f'{value:.0e}' for value in values)} | {of} |", flush=True)


def rows_of(data) -> list[Rows]:
    """Return pairs of arrays as rows."""
    return [list(zip(x, y, strict=True)) for x, y in data]


def clients_of() -> list[Rows]:
    """Return the rows of all clients, with a different linear truth for each."""
    jax.config.update("jax_enable_x64", True)
    torch.set_default_dtype(torch.float64)
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(CLIENTS, FEATURES, CLASSES))
    x = rng.normal(size=(CLIENTS, ROWS, FEATURES))
    y = np.argmax(x @ truth, axis=-1)
    print("| algorithm | difference | of |\n| --- | --- | --- |")
    return rows_of(zip(map(torch.tensor, x), map(torch.tensor, y), strict=True))
