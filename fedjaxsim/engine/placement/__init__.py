"""Where rows of data and clients' states lie between rounds, and who does the work."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from fedjaxsim.data.population import Population
from fedjaxsim.engine.program import Program


class Functions(NamedTuple):
    """The pure functions of a run, of whole states, as of `Program`.

    Attributes:
      init: `(key, hparams) -> state`.
      round: `(state, hparams, rows) -> (state, metrics)`.
      rounds: `(state, hparams, rows, rounds) -> (state, metrics)`.
      evaluate: `(state, hparams, rows) -> ClientMetrics`.
    """

    init: Callable[..., Any]
    round: Callable[..., Any]
    rounds: Callable[..., Any]
    evaluate: Callable[..., Any]


class Placement(Protocol):
    """Where rows and states lie. States have the same shapes in every placement."""

    def rows(self, population: Population) -> dict[str, Any]:
        """Every split of a population, placed: what the functions take as rows."""
        ...

    def compiled(self, program: Program) -> Functions:
        """The functions of a program, whose rows and states are placed so, ready to be called."""
        ...


def jitted(functions: Functions) -> Functions:
    """Each function compiled as a whole; several rounds reuse the buffers of the state."""
    return Functions(
        jax.jit(functions.init),
        jax.jit(functions.round),
        jax.jit(functions.rounds, static_argnames="rounds", donate_argnums=0),
        jax.jit(functions.evaluate),
    )
