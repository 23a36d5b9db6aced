"""Derivatives of a whole private run with respect to its hyperparameters.

A run is a function of its hyperparameters through local steps, clipping, noise (with the standard
normal numbers of the key fixed) and the server's optimizer. Discrete draws are fixed: cohorts and
minibatches.

Axes: m clients, T rounds.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.tree_util import Partial
from jax.typing import ArrayLike

from fedjaxsim import checks, keys
from fedjaxsim.engine.evaluation import measure_with, targets_of
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.engine.work import map_clients
from fedjaxsim.gradients.modes import Forward, Mode, Reverse, bounded, run_rounds
from fedjaxsim.hyperparameters import Hyperparameters, on_host
from fedjaxsim.keys import Stream, seed_key
from fedjaxsim.privacy.accounting.in_loop import noise_multiplier_in_jit
from fedjaxsim.privacy.assumptions import default_delta
from fedjaxsim.simulation import Simulation

PyTree = Any
Objective = Callable[[SimulationState, Hyperparameters], jax.Array]
"""(final state, hparams) -> (); a `jax.tree_util.Partial` if it holds arrays."""
Gradient = dict[str, jax.Array]
"""Derivatives by name, each of the shape of its hyperparameter."""

EPSILON = "epsilon"


def mean_metric(
    simulation: Simulation, metric: str = "loss", split: str = "validation", *, pooled: bool = False
) -> Objective:
    """Return the objective `Simulation.evaluate(...).mean(metric)`, for either mode.

    It is the mean over clients of their mean over rows of a split, which must have some, or if
    `pooled` the mean over the rows of all clients.
    """
    simulation.check_evaluated(split, None)
    rows, population = simulation.rows[split], simulation.population
    counts = targets_of(population, split, simulation.program.algorithm.task)
    present = int(np.sum(counts > 0))
    if present == 0:
        raise ValueError(f"the {split} split has no rows, so it has no mean {metric}")
    program = simulation.program
    choose = bounded(program.workload, rows).layout
    layout = choose()
    targets, total = jnp.maximum(counts, 1), jnp.float32(np.sum(counts))
    # Streaming metrics have no derivatives.
    measure = measure_with(simulation.task._replace(streaming_metrics={}))

    def value(rows, state, hparams):
        def one(personal, client_id):
            params = program.predict(state, personal, hparams, client_id, rows, layout)
            key = keys.stream(state.key, Stream.EVALUATION, state.round, client_id)
            data = rows.of(client_id, key, program.minibatches, layout)
            sums = measure(params, data).sums
            checks.one_of(sorted(sums), metric=metric)
            divisor = total if pooled else targets[client_id]
            return sums[metric] / divisor.astype(sums[metric].dtype)

        again = jax.checkpoint(one, prevent_cse=False)
        ids = jnp.arange(program.num_clients, dtype=jnp.int32)
        means = map_clients(again, state.personal, ids, choose, rows, sort=False)
        return jnp.sum(means) / (1 if pooled else present)

    return Partial(value, rows)


def check_names(
    names: Sequence[str], hparams: Hyperparameters, epsilon: ArrayLike | None = None
) -> None:
    """Check that derivatives with respect to the hyperparameters `names` exist."""
    fields = list(hparams)
    if not names:
        raise ValueError(f"wrt must name at least one of {fields}, got nothing")
    for name in names:
        if name == "sampling_rate":
            raise ValueError(
                "sampling_rate has no derivative: it decides who takes part, which is discrete; "
                "compare runs at several p"
            )
        checks.one_of([*fields, EPSILON], wrt=name)
        if name == EPSILON and epsilon is None:
            raise ValueError("a derivative with respect to epsilon needs its value")
    if "noise_multiplier" not in names:
        return
    if epsilon is not None:
        raise ValueError("noise_multiplier follows from epsilon, so it is not free to vary")
    clip_norm = on_host(hparams.get("clip", 1.0))  # without it, the mechanism checks its own
    if clip_norm is not None and not np.all(np.isfinite(clip_norm)):
        raise ValueError(
            f"noise_multiplier has no derivative without a finite clip, got {clip_norm}"
        )


def hypergradient(
    simulation: Simulation,
    objective: Objective,
    rounds: int,
    wrt: str | Sequence[str],
    *,
    mode: Mode | None = None,
    delta: float | None = None,
) -> Callable[..., tuple[jax.Array, Gradient]]:
    """Return the value and the gradient of an objective of the state after T rounds.

    `Forward()` and `Reverse()` give the same numbers at different costs.

    At fixed ε: given an ε, the returned function uses the noise multiplier z(ε, δ, p, T) that
    spends it by the in-jit RDP bound. "epsilon" in `wrt` is then the derivative along that curve,
    and all others are derivatives at constant ε.

    Args:
      simulation: the run, from its first round.
      objective: `(final state, hparams) -> ()`, e.g. `mean_metric(simulation)`.
      rounds: T.
      wrt: names of hyperparameters, and "epsilon"; not "sampling_rate", which decides a discrete
        draw. A noise schedule (T,) has a derivative for each round.
      mode: by default `Forward()`, for few numbers; `Reverse()` for many.
      delta: δ of ε; by default `default_delta(m)`.

    Returns:
      A function `(key, hparams, epsilon=None) -> (value, gradient)`: (), and by name. It is
      compiled once for all keys and hyperparameters. It raises ValueError, before any compute, if
      `Simulation.init` or `Simulation.run` would, and if `wrt` names something discrete.
    """
    checks.count(rounds=rounds)
    mode = Forward() if mode is None else mode
    if not isinstance(mode, Forward | Reverse):
        raise ValueError(f"mode must be Forward() or Reverse(), got {mode!r}")
    names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    delta = default_delta(simulation.num_clients) if delta is None else delta
    objective = objective if isinstance(objective, Partial) else Partial(objective)
    rows = simulation.rows["train"]
    program = mode.program(simulation.program, rows)

    def value(chosen, rows, objective, epsilon, key, hparams):
        simulation.check_start(key, hparams)
        epsilon = chosen.get(EPSILON, epsilon)
        hparams = hparams.replace(**{name: chosen[name] for name in chosen if name != EPSILON})
        if epsilon is not None:
            rate = program.sampling.rate(hparams)
            z = noise_multiplier_in_jit(epsilon, delta, rate, rounds)
            hparams = hparams.replace(noise_multiplier=z)
        state = program.init(key, hparams)
        length = mode.segment_length(program, state, rounds)
        return objective(run_rounds(program, state, hparams, rows, rounds, length), hparams)

    differentiate = mode.differentiate(value)

    def differentiated(*args):
        with program.tracing():
            return differentiate(*args)

    def function(key, hparams, epsilon=None):
        check_names(names, hparams, epsilon)
        _check(simulation, hparams, rounds, epsilon)
        key = key if isinstance(key, jax.Array) else seed_key(key)
        hparams = hparams.as_arrays()
        chosen = {name: getattr(hparams, name) for name in names if name != EPSILON}
        if epsilon is not None:
            epsilon = jnp.asarray(epsilon, float)
        if EPSILON in names:
            chosen[EPSILON], epsilon = epsilon, None
        return differentiated(chosen, rows, objective, epsilon, key, hparams)

    return function


def _check(
    simulation: Simulation, hparams: Hyperparameters, rounds: int, epsilon: ArrayLike | None
) -> None:
    """Check the run; traced hyperparameters are skipped."""
    if epsilon is not None:
        scheme, event = simulation.accounts[0]
        if scheme.kind not in ("poisson", "full") or event.kind != "gaussian":
            raise ValueError(
                "z(ε) is known for Gaussian noise with Poisson sampling or full participation, got "
                f"a {event.kind!r} mechanism with {scheme.kind!r} sampling"
            )
        value = on_host(epsilon)
        if value is not None and not (value.ndim == 0 and 0 < value < np.inf):
            raise ValueError(f"epsilon must be one positive, finite number, got {epsilon}")
        if np.ndim(hparams.get("noise_multiplier", 0.0)):
            raise ValueError(
                "z(ε) is known for noise that is constant over rounds: noise_multiplier must be a "
                f"number where epsilon is given, got {np.shape(hparams.noise_multiplier)} of them"
            )
        hparams = hparams.replace(noise_multiplier=1.0)
    simulation.check(hparams)
    traced = any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves(hparams))
    if epsilon is not None and not traced:
        drawn = [entry.noise_multiplier for entry in simulation.planned(hparams, 0, rounds).entries]
        if drawn != [1.0]:
            raise ValueError(
                "z(ε) is known for mechanisms that draw the noise multiplier that they are given, "
                f"got one that draws {drawn[0]:.4g} for 1"
            )
    if on_host(hparams.get("noise_multiplier", 0.0)) is not None:
        simulation.check_rounds(hparams, 0, rounds, None)
