"""`over_seeds`: the runs of several keys as one program, by `jax.vmap` of the whole program.

Each key draws its own cohorts, so nothing is shared but rows and code. A transform of any program,
sharded and batched ones too; it comes last.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjaxsim.engine.program import Program
from fedjaxsim.engine.state import SimulationState


def over_seeds(program: Program, seeds: int) -> "OverSeeds":
    """Return one program for the runs of R `seeds`.

    `init` takes keys (R,). A state has a first axis of seeds in all parts but `round`, which the
    runs share; so have metrics, (R, ...).

    Example:
      >>> keys = jax.random.split(jax.random.key(0), 4)
      >>> many = fjs.over_seeds(sim.program, 4)  # `sim` and `hparams` as in `Simulation`
      >>> jax.eval_shape(many.init, keys, hparams).key.shape
      (4,)
    """
    return OverSeeds(**Program.parts(program), program=program, seeds=seeds)


def state_of_seed(state: SimulationState, seed: int) -> SimulationState:
    """Return the state of one of several seeds."""
    alone = jax.tree.map(lambda leaf: leaf[seed], dataclasses.replace(state, round=()))
    return dataclasses.replace(alone, round=state.round)


def _axes(state: SimulationState) -> Any:
    """Return the axis of seeds in each part of a state."""
    axes: Any = {field.name: 0 for field in dataclasses.fields(SimulationState)}
    return SimulationState(**axes | {"round": None})


@dataclasses.dataclass(frozen=True)
class OverSeeds(Program):
    """A program of several seeds, as from `over_seeds`."""

    program: Program = dataclasses.field(kw_only=True)
    seeds: int = dataclasses.field(kw_only=True)

    def init(self, key, hparams):
        states = jax.vmap(self.program.init, (0, None))(key, hparams)
        return dataclasses.replace(states, round=jnp.zeros((), jnp.int32))

    def step(self, state, hparams, rows):
        return self._mapped(self.program.step, state, hparams, rows)

    def rounds(self, state, hparams, rows, rounds):
        def program_rounds(state, hparams, rows):
            return self.program.rounds(state, hparams, rows, rounds)

        return self._mapped(program_rounds, state, hparams, rows)

    def evaluate(self, state, hparams, rows, clients=None):
        mapped = jax.vmap(self.program.evaluate, (_axes(state), None, None, None))
        return mapped(state, hparams, rows, clients)

    def _mapped(self, function, state, hparams, rows):
        axes = _axes(state)
        return jax.vmap(function, (axes, None, None), (axes, 0))(state, hparams, rows)
