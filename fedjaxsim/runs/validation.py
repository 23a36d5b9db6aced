"""What settings and data must be for each other: checked before a run computes anything."""

from typing import TYPE_CHECKING

import jax
import numpy as np

from fedjaxsim.data.population import Population
from fedjaxsim.engine.memory import bytes_of
from fedjaxsim.privacy.guarantee import spent
from fedjaxsim.report.progress import bytes_text
from fedjaxsim.runs.memory import this_machine
from fedjaxsim.runs.parts import MODELS, OF_TOKENS
from fedjaxsim.runs.settings import RunConfig

if TYPE_CHECKING:
    from fedjaxsim.runs.build import Experiment

_CLASSES = ("digits", "leaf")
"""Data whose labels are classes."""
_SPARSE = 10
"""With so many times as many outputs as labels occur, labels are no numbers of classes."""


def check_data(config: RunConfig, population: Population) -> None:
    """Checks that there are rows to test on, and that they suit the model and the loss.

    Raises:
      ValueError: if no client has test rows, text or classes would be taken for numbers, or labels
        are far from 0 … c − 1.
    """
    if not population.splits["test"].count.any():
        raise ValueError(
            "no client has rows to test on: test-fraction must be larger, or the clients must have "
            f"more rows, got test-fraction {config.get('test_fraction')}"
        )
    if config.patience is not None and not population.splits["validation"].count.any():
        raise ValueError(
            "patience needs rows to validate on, and no client has any: validation-fraction must "
            f"be larger, got {config.get('validation_fraction')}"
        )
    kind = config.data.partition(":")[0]
    numbers = [model for model in MODELS if model not in OF_TOKENS]
    if "x" in population.categories and config.model in numbers:
        raise ValueError(
            f"the features are text, whose characters or words model {config.model} would take for "
            f"numbers: model must be {', '.join(OF_TOKENS)} or one of your own, MODULE:FACTORY"
        )
    x = population.fields.get("x")
    if config.model in OF_TOKENS and x is not None and not _are_tokens(x):
        raise ValueError(
            f"model {config.model} needs rows of tokens, integers (n, L) from 0 on, got x "
            f"{x.dtype} {x.shape}"
        )
    if config.loss == "squared" and (kind in _CLASSES or "y" in population.categories):
        raise ValueError(
            f"the labels of {kind} are classes, which loss squared would take for numbers: loss "
            "must be softmax or one-vs-all"
        )
    labels = population.fields.get("y")
    if labels is not None and labels.min() == labels.max():
        raise ValueError(f"y is {labels.flat[0]} in all rows: there is nothing to predict")
    of_classes = config.loss in ("softmax", "one-vs-all") and "y" not in population.categories
    if of_classes and labels is not None and labels.dtype.kind == "i":
        occurring, outputs = len(np.unique(labels)), int(labels.max()) + 1
        if outputs > _SPARSE * max(2, occurring):
            raise ValueError(
                f"labels must number the classes from 0: only {occurring} different ones occur, "
                f"but the largest is {outputs - 1}, which asks for {outputs} outputs"
            )


def _are_tokens(x: np.ndarray) -> bool:
    return x.dtype.kind in "iu" and x.ndim == 2 and x.min() >= 0


def labels_like_classes(config: RunConfig, population: Population) -> str | None:
    """What to say where loss squared meets labels 0 … c − 1, which may well number c classes."""
    labels = population.fields.get("y")
    if config.loss != "squared" or labels is None or population.generate is not None:
        return None
    values = np.unique(labels)
    if len(values) < 3 or not np.array_equal(values, np.arange(len(values))):
        return None
    return (
        f"the labels are 0 to {len(values) - 1}, which loss squared takes for numbers: if they are "
        "classes, loss must be softmax or one-vs-all"
    )


def check_start(experiment: "Experiment") -> None:
    """Checks that a run can start, fits into memory, and has an ε that can be computed.

    Raises:
      ValueError: naming what is wrong and what to change.
    """
    config, simulation, hparams = experiment.config, experiment.simulation, experiment.hparams
    fields = simulation.population.fields.values()
    row = sum(value.nbytes // len(value) for value in fields)
    batches = simulation.setup.layout.chunk_size * config.get("batch_size", 10) * row
    machine = this_machine()
    _check_memory(batches, machine.of_devices, "minibatches", "batch-size or chunk-size")
    simulation.setup.check_start(config.seed, hparams)
    program, key = simulation.program, jax.random.key(0, impl="threefry2x32")
    state = jax.eval_shape(program.init, key, hparams.as_arrays())
    states = machine.host if simulation.setup.streamed else machine.of_devices
    _check_memory(2 * bytes_of(state), states, "models of all clients", "clients or hidden")
    if simulation.mechanism.event.kind == "gaussian" and experiment.noise_multiplier > 0:
        spent((experiment.planned(),), experiment.delta, accountant=simulation.setup.accountant)


def _check_memory(needed: int, available: int, what: str, remedy: str) -> None:
    if needed > available:
        raise ValueError(
            f"the {what} need {bytes_text(needed)} of memory, and there are "
            f"{bytes_text(available)}: {remedy} must be smaller"
        )
