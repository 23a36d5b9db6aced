"""Derivatives of a whole private run with respect to its hyperparameters.

A run is a function of its hyperparameters through local steps, clipping, noise (with the standard
normal numbers of the key fixed) and the server's optimizer. Discrete draws are fixed: cohorts and
minibatches.

Axes: m clients, T rounds.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jax.typing import ArrayLike

from fedjaxsim import checks
from fedjaxsim.engine.evaluation import measure_with, targets_of
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.engine.work import map_clients
from fedjaxsim.gradients.modes import Forward, Mode, Run, bounded
from fedjaxsim.hyperparameters import Hyperparameters, on_host
from fedjaxsim.kernels import backend
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.accounting.in_loop import epsilon_in_jit, noise_multiplier_in_jit
from fedjaxsim.privacy.assumptions import default_delta
from fedjaxsim.simulation import Simulation

PyTree = Any
Objective = Callable[[SimulationState, Hyperparameters], jax.Array]
"""(final state, hparams) -> (); a `jax.tree_util.Partial` if it holds arrays."""
Gradient = dict[str, jax.Array]
"""Derivatives by name, each of the shape of its hyperparameter."""

EPSILON = "epsilon"


def mean_metric(
    simulation: Simulation, metric: str = "loss", split: str = "validation"
) -> Objective:
    """Return the objective `Simulation.evaluate(...).mean(metric)`, for either mode.

    It is the mean over clients of their mean over rows.

    Raises:
      ValueError: if there is no such split or it has no rows. When the objective is first used, if
        `metric` is not among the task's `metrics`.
    """
    simulation.check_evaluated(split, None)
    rows, population = simulation.rows[split], simulation.population
    counts = targets_of(population, split, simulation.task)
    present = int(np.sum(counts > 0))
    if present == 0:
        raise ValueError(f"the {split} split has no rows, so it has no mean {metric}")
    program = simulation.program
    choose = bounded(program.workload, rows).layout
    layout = choose()
    targets = jnp.maximum(counts, 1)
    # Streaming metrics have no derivatives.
    measure = measure_with(simulation.task._replace(streaming_metrics={}))

    def value(rows, state, hparams):
        def one(personal, client_id, most_rows):
            params = program.predict(state, personal, hparams, client_id, rows, layout)
            data = rows.of(client_id, state.key, program.minibatches, layout)
            sums = measure(params, data, most_rows).sums
            checks.one_of(sorted(sums), metric=metric)
            return sums[metric] / targets[client_id].astype(sums[metric].dtype)

        again = jax.checkpoint(one, prevent_cse=False, static_argnums=2)
        ids = jnp.arange(program.num_clients, dtype=jnp.int32)
        means = map_clients(again, state.personal, ids, choose, rows, sort=False)
        return jnp.sum(means) / present

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
                "sampling_rate has no derivative here: it decides who takes part, which is "
                "discrete. gradients.epsilon_by_sampling_rate gives dε/dp; for the rest, compare "
                "runs at several p"
            )
        checks.one_of([*fields, EPSILON], wrt=name)
        if name == EPSILON and epsilon is None:
            raise ValueError("a derivative with respect to epsilon needs its value")
    if "noise_multiplier" not in names:
        return
    if epsilon is not None:
        raise ValueError("noise_multiplier follows from epsilon, so it is not free to vary")
    clip_norm = on_host(hparams.get("clip", np.inf))
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

    `Forward()` and `Reverse()` give the same numbers at different costs. `Implicit()` gives the
    derivative of the fixed point that rounds without random draws lead to.

    At fixed ε: given an ε, the returned function uses the noise multiplier z(ε, δ, p, T) that
    spends it by the in-jit RDP bound. "epsilon" in `wrt` is then the derivative along that curve,
    and all others are derivatives at constant ε.

    Args:
      simulation: the run, from its first round.
      objective: `(final state, hparams) -> ()`, e.g. `mean_metric(simulation)`.
      rounds: T.
      wrt: names of hyperparameters, and "epsilon"; not "sampling_rate", which decides a discrete
        draw. A noise schedule (T,) has a derivative for each round.
      mode: by default `Forward()`, for few numbers; `Reverse()` for many, or `Implicit()`.
      delta: δ of ε; by default `default_delta(m)`.

    Returns:
      A function `(key, hparams, epsilon=None) -> (value, gradient)`: (), and by name. It is
      compiled once for all keys and hyperparameters. It raises ValueError, before any compute, if
      `Simulation.init` or `Simulation.run` would, and if `wrt` names something discrete.

    Raises:
      ValueError: if T is below 1, the mode is none, or rounds have no fixed point for `Implicit()`.
    """
    checks.count(rounds=rounds)
    mode = Forward() if mode is None else mode
    if not hasattr(mode, "differentiate"):
        raise ValueError(f"mode must be Forward(), Reverse() or Implicit(), got {mode!r}")
    names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    delta = default_delta(simulation.num_clients) if delta is None else delta
    objective = objective if isinstance(objective, Partial) else Partial(objective)
    program, rows = simulation.program.with_capped_batches(), simulation.rows["train"]

    def begin(chosen, epsilon, key, hparams):
        simulation.check_start(key, hparams)
        epsilon = chosen.get(EPSILON, epsilon)
        hparams = hparams.replace(**{name: chosen[name] for name in chosen if name != EPSILON})
        if epsilon is not None:
            rate = program.sampling.rate(hparams)
            z = noise_multiplier_in_jit(epsilon, delta, rate, rounds)
            hparams = hparams.replace(noise_multiplier=z)
        return program.init(key, hparams), hparams

    differentiate = mode.differentiate(Run(program, begin, rows, rounds))

    def function(key, hparams, epsilon=None):
        check_names(names, hparams, epsilon)
        _check(simulation, hparams, rounds, epsilon)
        key = key if isinstance(key, jax.Array) else jax.random.key(key, impl="threefry2x32")
        hparams = hparams.as_arrays()
        chosen = {name: getattr(hparams, name) for name in names if name != EPSILON}
        if epsilon is not None:
            epsilon = jnp.asarray(epsilon, float)
        if EPSILON in names:
            chosen[EPSILON], epsilon = epsilon, None
        return differentiate(chosen, rows, objective, epsilon, key, hparams)

    return function


def price_of_privacy(
    simulation: Simulation, objective: Objective, rounds: int, *, delta: float | None = None
) -> Callable[[jax.Array | int, Hyperparameters, ArrayLike], tuple[jax.Array, jax.Array]]:
    """Return the objective of a run that spends ε, and its derivative in ε; see `hypergradient`.

    It is a function `(key, hparams, epsilon) -> (value, d value/dε)`, both (), which ignores the
    noise multiplier of `hparams`.
    """
    function = hypergradient(simulation, objective, rounds, EPSILON, delta=delta)

    def price(key, hparams, epsilon):
        value, gradient = function(key, hparams, epsilon)
        return value, gradient[EPSILON]

    return price


def epsilon_by_sampling_rate(
    simulation: Simulation, hparams: Hyperparameters, rounds: int, delta: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Compute ε of a run of T rounds by the in-jit RDP bound, and dε/dp at its noise, both ().

    The noise multiplier of `hparams` is () or (T,), and δ by default `default_delta(m)`.

    Raises:
      ValueError: if ε does not depend on p (sampling is not Poisson, p is 1, or nothing private is
        released), or the run could not be done.
    """
    scheme, event = simulation.accounts[0]
    simulation.check(hparams)
    simulation.check_rounds(hparams, 0, rounds, None)
    rate = float(np.asarray(hparams.get("sampling_rate", 1.0)))
    if scheme.kind != "poisson" or event.kind != "gaussian" or rate >= 1:
        raise ValueError(
            "ε has a derivative in p for Poisson sampling with p < 1 and Gaussian noise, got "
            f"{scheme.kind!r} sampling with p = {rate} and a {event.kind!r} mechanism"
        )
    delta = default_delta(simulation.num_clients) if delta is None else delta
    schedule = np.broadcast_to(np.asarray(hparams.noise_multiplier, np.float64), (rounds,))
    z, counts = np.unique(schedule, return_counts=True)
    z, counts = jnp.asarray(z, float), jnp.asarray(counts, jnp.int32)
    return _epsilon_slope(jnp.asarray(rate, float), z, counts, delta, scheme, event)


@functools.partial(jax.jit, static_argnums=(4, 5))
@jax.value_and_grad
def _epsilon_slope(p, z, counts, delta, scheme, event):
    charges = dataclasses.replace(
        ledger.no_charges(scheme, event, z.shape[0]),
        noise_multiplier=z,
        sampling_rate=jnp.broadcast_to(p, z.shape),
        rounds=counts,
    )
    return epsilon_in_jit(ledger.Ledger((charges,)), delta)


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
    if on_host(hparams.get("noise_multiplier", 0.0)) is not None:
        simulation.check_rounds(hparams, 0, rounds, None)


class Estimate(NamedTuple):
    """A mean over S seeds, and the sample standard deviation divided by √S."""

    mean: PyTree
    standard_error: PyTree


def map_seeds(function: Callable[[jax.Array], PyTree], keys: jax.Array) -> PyTree:
    """Apply a function to each of keys (S,), leaves (S, ...).

    One after another on a CPU, where a batch of whole runs takes S times the memory for no gain.
    """
    on_cpu = backend.platform() == "cpu"
    return jax.lax.map(function, keys) if on_cpu else jax.vmap(function)(keys)


def over_seeds(function: Callable[..., PyTree]) -> Callable[..., Estimate]:
    """Return the mean of a function over seeds, with its standard error.

    One key gives the value and gradient of one realization of cohorts, minibatches and noise. Their
    means are unbiased estimates of the mean over all runs and of its gradient.

    Args:
      function: `(key, hparams, ...) -> pytree`, from `hypergradient` or `price_of_privacy`.

    Returns:
      A compiled function `(keys, hparams, ...) -> Estimate` of keys (S,), S ≥ 2.
    """

    @jax.jit
    def mapped(keys, *arguments):
        values = map_seeds(lambda key: function(key, *arguments), keys)

        def error(v):
            return jnp.std(v, axis=0, ddof=1) / math.sqrt(keys.shape[0])

        mean = jax.tree.map(lambda v: jnp.mean(v, axis=0), values)
        return Estimate(mean, jax.tree.map(error, values))

    def averaged(keys, hparams, *arguments):
        if keys.ndim != 1 or keys.shape[0] < 2:
            raise ValueError(
                f"a mean over seeds needs keys of shape (S,) with S at least 2, got {keys.shape}"
            )
        # Values can be checked only before they are traced.
        jax.eval_shape(lambda key: function(key, hparams, *arguments), keys[0])
        return mapped(keys, hparams.as_arrays(), *arguments)

    return averaged
