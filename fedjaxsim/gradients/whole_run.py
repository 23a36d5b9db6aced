"""Derivatives of a whole private run with respect to its hyperparameters.

A run is a function of its hyperparameters through local steps, clipping, noise (with the standard
normal numbers of the key fixed) and the server's optimizer. Discrete draws are fixed: cohorts and
minibatches.

Axes: m clients, T rounds.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial
from jax.typing import ArrayLike

from fedjaxsim import checks, keys
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.engine.evaluation import measure_with, targets_of
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.engine.work import map_clients
from fedjaxsim.gradients.modes import Forward, Mode, Reverse, bounded, run_rounds
from fedjaxsim.hyperparameters import Hyperparameters, on_host
from fedjaxsim.keys import Stream, seed_key
from fedjaxsim.privacy.assumptions import default_delta
from fedjaxsim.privacy.guarantee import tight_epsilon
from fedjaxsim.simulation import Simulation

PyTree = Any
Objective = Callable[[SimulationState, Hyperparameters], jax.Array]
"""(final state, hparams) -> (); a `jax.tree_util.Partial` if it holds arrays."""
Gradient = dict[str, jax.Array]
"""A dict of derivatives, each of the shape of its hyperparameter."""

EPSILON = "epsilon"
_APART = 0.03
"""Relative distance of the noise multipliers between which ε(z) has its slope: rounding of the
accountant is below a hundredth of what ε changes there."""


def mean_metric(
    simulation: Simulation, metric: str = "loss", split: str = "validation", *, pooled: bool = False
) -> Objective:
    """Return the objective `Simulation.evaluate(...).mean(metric)`, for either mode.

    It is the mean over clients of their mean over rows of a split, which must have some, or if
    `pooled` the mean over the rows of all clients. A derivative of a metric that is constant
    between jumps, such as the accuracy, is refused.

    Example:
      >>> loss = fjs.gradients.mean_metric(sim, split="test")  # sim and state as in `Simulation`
      >>> evaluated = history[-1].evaluation.mean("loss")
      >>> round(float(loss(state, hparams.as_arrays()) / evaluated), 4)
      1.0
    """
    simulation.check_evaluated(split, None)
    rows, population = simulation.rows[split], simulation.population
    counts = targets_of(population, split, simulation.program.algorithm.task)
    present = int(np.sum(counts > 0))
    if present == 0:
        raise ValueError(f"the {split} split has no rows, so it has no mean {metric}")
    program = simulation.program
    plan = bounded(program.plan, rows)
    targets, total = jnp.maximum(counts, 1), jnp.float32(np.sum(counts))
    # Streaming metrics have no derivatives.
    measure = measure_with(simulation.task._replace(streaming_metrics={}))

    def value(rows, state, hparams):
        def one(personal, client_id):
            params = program.predict(state, personal, hparams, client_id, rows, plan.reading)
            key = keys.stream(state.key, Stream.EVALUATION, state.round, client_id)
            data = rows.of(client_id, key, program.minibatches, plan.reading)
            sums = measure(params, data).sums
            checks.one_of(sorted(sums), metric=metric)
            value = differentiable(metric, params, sums)
            divisor = total if pooled else targets[client_id]
            return value / divisor.astype(value.dtype)

        again = jax.checkpoint(one, prevent_cse=False)
        ids = jnp.arange(program.num_clients, dtype=jnp.int32)
        means = map_clients(again, state.personal, ids, plan, rows, sort=False)
        return jnp.sum(means) / (1 if pooled else present)

    return Partial(value, rows)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def differentiable(metric: str, params: PyTree, sums: dict[str, jax.Array]) -> jax.Array:
    """Return a metric's sum; refuse a derivative that is zero for every change of `params`."""
    return sums[metric]


def _derivative(metric, primals, tangents):
    of_params, of_sums = tangents
    moves = not all(isinstance(t, SymbolicZero) for t in jax.tree.leaves(of_params))
    if moves and isinstance(of_sums[metric], SymbolicZero):
        smooth = [name for name, t in of_sums.items() if not isinstance(t, SymbolicZero)]
        instead = f"take {' or '.join(map(repr, smooth))}" if smooth else "take a smooth one"
        raise ValueError(
            f"the metric {metric!r} is constant between jumps, so its derivative is 0 and says "
            f"nothing: {instead}"
        )
    tangent = of_sums[metric]
    value = primals[1][metric]
    return value, jnp.zeros_like(value) if isinstance(tangent, SymbolicZero) else tangent


differentiable.defjvp(_derivative, symbolic_zeros=True)


def check_names(
    names: Sequence[str], hparams: Hyperparameters, epsilon: ArrayLike | None = None
) -> None:
    """Check that derivatives with respect to the hyperparameters `names` exist."""
    fields = list(hparams)
    if not names:
        raise ValueError(f"wrt must name at least one of {fields}, got nothing")
    for name in names:
        if name == "sampling_rate":
            raise SettingError(
                Name("sampling_rate"),
                " has no derivative: it decides who takes part, which is discrete; "
                "compare runs at several p",
            )
        checks.one_of([*fields, EPSILON], wrt=name)
        if name == EPSILON and epsilon is None:
            raise ValueError("a derivative with respect to epsilon needs its value")
    if "noise_multiplier" not in names:
        return
    if epsilon is not None:
        raise SettingError(
            Name("noise_multiplier"), " follows from epsilon, so it is not free to vary"
        )
    clip_norm = on_host(hparams.get("clip", 1.0))  # without it, the mechanism checks its own
    if clip_norm is not None and not np.all(np.isfinite(clip_norm)):
        raise SettingError(
            Name("noise_multiplier"), f" has no derivative without a finite clip, got {clip_norm}"
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

    At fixed ε: given an ε, the returned function uses the noise multiplier z(ε) that
    `Simulation.calibrate` finds. "epsilon" in `wrt` is then the derivative along that curve, with
    dz/dε by the implicit function, and all others are derivatives at constant ε.

    Args:
      simulation: the run, from its first round.
      objective: `(final state, hparams) -> ()`, e.g. `mean_metric(simulation)`.
      rounds: T.
      wrt: names of hyperparameters, and "epsilon"; not "sampling_rate", which decides a discrete
        draw. A noise schedule (T,) has a derivative for each round.
      mode: by default `Forward()`, for few numbers; `Reverse()` for many.
      delta: δ of ε; by default `default_delta(m)`.

    Returns:
      A function `(key, hparams, epsilon=None) -> (value, gradient)`: (), and a dict. It is
      compiled once for all keys and hyperparameters. It raises ValueError, before any compute, if
      `Simulation.init` or `Simulation.run` would, if `wrt` names something discrete, and where
      the objective is `mean_metric` of a metric that is constant between jumps.
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

    def value(chosen, rows, objective, key, hparams):
        simulation.check_start(key, hparams)
        hparams = hparams.replace(**chosen)
        state = program.init(key, hparams)
        length = mode.segment_length(program, state, rounds)
        return objective(run_rounds(program, state, hparams, rows, rounds, length), hparams)

    differentiate = mode.differentiate(value)

    def differentiated(*args):
        with program.tracing():
            return differentiate(*args)

    def function(key, hparams, epsilon=None):
        check_names(names, hparams, epsilon)
        if epsilon is not None:
            hparams = _calibrated(simulation, hparams, rounds, epsilon, delta, names)
        _check(simulation, hparams, rounds)
        key = key if isinstance(key, jax.Array) else seed_key(key)
        slope = _noise_slope(simulation, hparams, rounds, delta) if EPSILON in names else 1.0
        hparams = hparams.as_arrays()
        # ε acts through the noise alone: dL/dε = dL/dz · dz/dε.
        read = {name: "noise_multiplier" if name == EPSILON else name for name in names}
        chosen = {name: getattr(hparams, name) for name in read.values()}
        value, gradient = differentiated(chosen, rows, objective, key, hparams)
        by_name = {name: gradient[through] for name, through in read.items()}
        if EPSILON in names:
            by_name[EPSILON] = by_name[EPSILON] * slope
        return value, by_name

    return function


def _calibrated(
    simulation: Simulation,
    hparams: Hyperparameters,
    rounds: int,
    epsilon: ArrayLike,
    delta: float,
    names: Sequence[str],
) -> Hyperparameters:
    """Return the hyperparameters with the noise of an ε, as `Simulation.calibrate` finds it."""
    value = on_host(epsilon)
    if value is None or on_host(hparams.get("sampling_rate", 1.0)) is None:
        raise SettingError(
            "z(ε) is found on the host, so epsilon and ",
            Name("sampling_rate"),
            " must be numbers there: in jit, fjs.privacy.noise_multiplier_in_jit bounds it",
        )
    if not (value.ndim == 0 and 0 < value < np.inf):
        raise ValueError(f"epsilon must be one positive, finite number, got {epsilon}")
    if np.ndim(hparams.get("noise_multiplier", 0.0)):
        raise SettingError(
            "at a fixed epsilon noise is constant over rounds: ",
            Name("noise_multiplier"),
            f" must be a number, got {np.shape(hparams.noise_multiplier)} of them",
        )
    with jax.ensure_compile_time_eval():  # a caller may trace the rest
        calibrated = simulation.calibrate(hparams, epsilon=float(value), rounds=rounds, delta=delta)
        also = [name for name in simulation.noise_reads(calibrated) if name in names]
    if also:
        raise ValueError(
            f"the noise follows from {also[0]}, too: at a fixed epsilon it has no derivative"
        )
    return calibrated


def _noise_slope(
    simulation: Simulation, hparams: Hyperparameters, rounds: int, delta: float
) -> float:
    """Return dz/dε of z(ε) at z, by the implicit function: 1/(dε/dz)."""

    def cost(z):
        planned = simulation.planned(hparams.replace(noise_multiplier=z), 0, rounds)
        return tight_epsilon([*simulation.prepared, planned], delta)

    with jax.ensure_compile_time_eval():
        z = float(hparams.noise_multiplier)
        below, above = (np.float32(z * (1 + side * _APART)) for side in (-1, 1))
        return float(above - below) / (cost(above) - cost(below))


def _check(simulation: Simulation, hparams: Hyperparameters, rounds: int) -> None:
    """Check the run; traced hyperparameters are skipped."""
    simulation.check(hparams)
    if on_host(hparams.get("noise_multiplier", 0.0)) is not None:
        simulation.check_rounds(hparams, 0, rounds, None)
