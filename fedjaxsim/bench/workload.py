"""What a workload is: how it is built, and what it takes to run and to judge it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fedjaxsim.bench.work import Work
from fedjaxsim.data.population import Population
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.simulation import Simulation

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Load:
    """A workload that is built and ready to run.

    Attributes:
      init: `() -> state` before the first round.
      advance: `(state, rounds) -> (state, metrics)`: one compiled segment, which takes over the
        buffers of the state.
      evaluate: `(state) -> evaluation` on the test split, or None where it is of no interest.
      rounds: in one segment.
      work: of one round.
      data_bytes: the population's rows.
      devices: which compute.
      chunk_size: clients that a device works on together; None where settings fill a batch, too.
      data: where the data come from.
    """

    init: Callable[[], PyTree]
    advance: Callable[[PyTree, int], tuple[PyTree, PyTree]]
    evaluate: Callable[[PyTree], Any] | None
    rounds: int
    work: Work
    data_bytes: int
    devices: tuple[Any, ...]
    chunk_size: int | None = None
    data: str = "synthetic"


@dataclasses.dataclass(frozen=True)
class Workload:
    """A named workload.

    Attributes:
      name: on the command line.
      summary: what it is, in a line.
      builder: what builds it.
      settings: that it is built with; `data` among them where it can run on real data.
      curve: the growth curve to which it belongs, or None.
      size: where on that curve.
    """

    name: str
    summary: str
    builder: Callable[..., Load]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    curve: str | None = None
    size: int | None = None

    def build(self, data: str | None = None, **changes: Any) -> Load:
        """Builds it.

        Args:
          data: a specification such as "leaf:PATH", if there are real data.
          changes: to its settings, e.g. to make it small.
        """
        real = {"data": data} if "data" in self.settings else {}
        return self.builder(**{**self.settings, **real, **changes})


def simulate(simulation: Simulation, hparams: Hyperparameters, work: Work, rounds: int) -> Load:
    """The load of one simulation; evaluations are timed, too, where clients have rows for testing.

    Args:
      simulation: the parts together, on the devices that compute.
      hparams: of `Simulation.run`.
      work: of one round.
      rounds: in one compiled segment.
    """
    hparams = simulation.check(hparams)
    tests = simulation.population.splits["test"].count.any()

    def advance(state, rounds):
        return simulation._segment(state, hparams, simulation._placed["train"], rounds=rounds)

    return Load(
        init=lambda: simulation.init(0, hparams),
        advance=advance,
        evaluate=(lambda state: simulation.evaluate(state, hparams)) if tests else None,
        rounds=rounds,
        work=work,
        data_bytes=data_bytes(simulation.population),
        devices=simulation.devices or tuple(jax.devices()[:1]),
        chunk_size=simulation.chunk_size(hparams),
    )


def data_bytes(population: Population) -> int:
    """The size of a population's rows."""
    return sum(field.nbytes for field in population.fields.values())
