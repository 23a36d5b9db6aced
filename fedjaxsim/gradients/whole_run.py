"""Derivatives of a whole private run with respect to its hyperparameters.

A run is a function of its hyperparameters: through local steps, clipping, the noise (whose standard
normal numbers belong to the key and stay the same) and the server's optimizer. What is drawn from
a finite set is held fixed: who takes part, and which rows are in a minibatch.

Axes: m clients, T rounds, S seeds.
"""

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial
from jax.typing import ArrayLike

from fedjaxsim.engine.evaluation import targets_of
from fedjaxsim.engine.program import measure_with
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.engine.work import map_clients
from fedjaxsim.gradients.reverse import bounded, reversible, run_rounds, segment_length
from fedjaxsim.hyperparameters import Hyperparameters, on_host
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.accounting.in_loop import epsilon_in_jit, noise_multiplier_in_jit
from fedjaxsim.privacy.assumptions import default_delta
from fedjaxsim.simulation import Simulation

PyTree = Any
Mode = Literal["forward", "reverse"]
Objective = Callable[[SimulationState, Hyperparameters], jax.Array]
"""(final state, hparams) -> (); a `jax.tree_util.Partial` where it holds arrays of its own."""
Gradient = dict[str, jax.Array]
"""By name, each of the shape of its hyperparameter."""

EPSILON = "epsilon"


# --- objectives -----------------------------------------------------------------------------------


def mean_metric(
    simulation: Simulation,
    metric: str = "loss",
    split: str = "validation",
) -> Objective:
    """The mean over clients of a metric of the models they predict with, for either mode.

    What `Simulation.evaluate(...).mean(metric)` reports: each client counts once, with the mean
    over its rows.

    Args:
      simulation: whose clients and task these are.
      metric: one of the task's `metrics`.
      split: which rows.

    Raises:
      ValueError: if there is no such split or it has no rows. When the objective is first used, if
        the task has no such metric.
    """
    simulation.setup.check_split(split)
    rows, population = simulation.setup.rows[split], simulation.population
    counts = targets_of(population, split, simulation.task)
    present = int(np.sum(counts > 0))
    if present == 0:
        raise ValueError(f"the {split} split has no rows, so it has no mean {metric}")
    program = simulation.program
    layout = bounded(program.layout, rows)
    targets = jnp.maximum(counts, 1)
    measure = measure_with(
        simulation.task._replace(streaming_metrics={})
    )  # which have no derivatives

    def value(rows, state, hparams):
        def one(personal, client_id):
            params = program.algorithm.predict(state.shared, personal, hparams, client_id)
            data = rows.of(client_id, state.key, program.minibatches, layout)
            sums = measure(params, data, rows.most_rows).sums
            if metric not in sums:
                raise ValueError(f"metric must be one of {sorted(sums)}, got {metric!r}")
            return sums[metric] / targets[client_id].astype(sums[metric].dtype)

        again = jax.checkpoint(one, prevent_cse=False)
        ids = jnp.arange(program.num_clients, dtype=jnp.int32)
        means = map_clients(again, state.personal, ids, layout)
        return jnp.sum(means) / present

    return Partial(value, rows)


# --- derivatives of a run -------------------------------------------------------------------------


def hypergradient(
    simulation: Simulation,
    objective: Objective,
    rounds: int,
    wrt: str | Sequence[str],
    *,
    mode: Mode = "forward",
    delta: float | None = None,
    segment: int | None = None,
) -> Callable[..., tuple[jax.Array, Gradient]]:
    """The value and the gradient of an objective of the state after T rounds.

    Forward mode carries one derivative of the state for every number in `wrt` through the rounds:
    its time grows with how many they are, its memory does not grow with T. Reverse mode goes
    through the run backwards, for any number of derivatives at two to four times the time of a run,
    and keeps part of every round (see `reverse.segment_length`). Both give the same numbers.

    At fixed ε: where the returned function is given an ε, the noise multiplier is z(ε, δ, p, T),
    the one that spends it by the in-jit RDP bound. "epsilon" in `wrt` is then the derivative along
    that curve, and all others are those at constant ε.

    Args:
      simulation: what is run, from its first round.
      objective: `(final state, hparams) -> ()`, e.g. `mean_metric(simulation)`.
      rounds: T.
      wrt: names of hyperparameters, and "epsilon"; not "sampling_rate", since who takes part
        is discrete. A noise schedule (T,) has a derivative for each round.
      mode: "forward" for few numbers, "reverse" for many.
      delta: δ at which ε is meant; by default `default_delta(m)`.
      segment: in reverse mode, rounds that are done again together; by default what needs the
        least memory. T keeps all rounds, which saves a third of the time.

    Returns:
      A function `(key, hparams, epsilon=None) -> (value, gradient)`: (), and by name. It is
      compiled once for all keys and values of hyperparameters. It raises ValueError, before any
      compute, as `Simulation.init` and `Simulation.run`, and if `wrt` names what cannot be
      differentiated.

    Raises:
      ValueError: if T or the segment is below 1, or the mode is unknown.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if mode not in ("forward", "reverse"):
        raise ValueError(f"mode must be 'forward' or 'reverse', got {mode!r}")
    if segment is not None and segment < 1:
        raise ValueError(f"segment must be at least 1, got {segment}")
    names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    delta = default_delta(simulation.num_clients) if delta is None else delta
    objective = objective if isinstance(objective, Partial) else Partial(objective)
    run = _run(simulation, rounds, mode, delta, segment)
    differentiate = jax.jit(_forward(run) if mode == "forward" else jax.value_and_grad(run))
    rows = simulation.setup.rows["train"]

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
        return differentiate(chosen, epsilon, key, hparams, rows, objective)

    return function


def _run(simulation: Simulation, rounds: int, mode: Mode, delta: float, segment: int | None):
    """The objective of a run as a pure function, of the chosen hyperparameters first."""
    program = simulation.program.limited()
    if mode == "reverse":
        program = reversible(program, simulation.setup.rows["train"])

    def run(chosen, epsilon, key, hparams, rows, objective):
        simulation.setup.check_start(key, hparams)
        epsilon = chosen.get(EPSILON, epsilon)
        hparams = hparams.replace(**{name: chosen[name] for name in chosen if name != EPSILON})
        if epsilon is not None:
            rate = program.sampling.rate(hparams)
            z = noise_multiplier_in_jit(epsilon, delta, rate, rounds)
            hparams = hparams.replace(noise_multiplier=z * program.mechanism.event.zero_out)
        state = program.init(key, hparams)
        length = rounds
        if mode == "reverse":
            length = segment_length(program, state, rounds) if segment is None else segment
        state = run_rounds(program, state, hparams, rows, rounds, length)
        return objective(state, hparams)

    return run


def _forward(run: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, Gradient]]:
    """Forward mode: the derivatives in all directions at once, next to one run."""

    def differentiate(chosen, *arguments):
        point, unravel = ravel_pytree(chosen)

        def along(direction):
            return jax.jvp(lambda at: run(unravel(at), *arguments), (point,), (direction,))

        value, slopes = jax.vmap(along, out_axes=(None, 0))(jnp.eye(point.size, dtype=point.dtype))
        return value, unravel(slopes)

    return differentiate


def price_of_privacy(
    simulation: Simulation,
    objective: Objective,
    rounds: int,
    *,
    delta: float | None = None,
) -> Callable[[jax.Array | int, Hyperparameters, ArrayLike], tuple[jax.Array, jax.Array]]:
    """The objective of a run that spends ε, and what a little more ε changes of it.

    Args:
      simulation: as of `hypergradient`.
      objective: likewise.
      rounds: T.
      delta: δ; by default `default_delta(m)`.

    Returns:
      A function `(key, hparams, epsilon) -> (value, d value/dε)`, both (). The noise multiplier of
      `hparams` is not read.

    Raises:
      ValueError: as `hypergradient`.
    """
    function = hypergradient(simulation, objective, rounds, EPSILON, delta=delta)

    def price(key, hparams, epsilon):
        value, gradient = function(key, hparams, epsilon)
        return value, gradient[EPSILON]

    return price


def epsilon_by_sampling_rate(
    simulation: Simulation, hparams: Hyperparameters, rounds: int, delta: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """ε of a run by the in-jit RDP bound, and dε/dp at its noise: all that p has a derivative of.

    Args:
      simulation: whose sampler and mechanism these are.
      hparams: z, () or (T,), and p.
      rounds: T.
      delta: δ in (0, 1); by default `default_delta(m)`.

    Returns:
      ε and dε/dp, both ().

    Raises:
      ValueError: if p does not decide what ε is (sampling is not Poisson, p is 1, or nothing that
        is private is released), or the run could not be done.
    """
    scheme, event = simulation.sampling.scheme, simulation.mechanism.event
    simulation.setup.check(hparams)
    simulation.setup.check_rounds(hparams, 0, rounds, None)
    rate = float(np.asarray(hparams.get("sampling_rate", 1.0)))
    if scheme.kind != "poisson" or event.kind != "gaussian" or rate >= 1:
        raise ValueError(
            "ε has a derivative in p for Poisson sampling with p < 1 and Gaussian noise, got "
            f"{scheme.kind!r} sampling with p = {rate} and a {event.kind!r} mechanism"
        )
    delta = default_delta(simulation.num_clients) if delta is None else delta
    schedule = np.broadcast_to(np.asarray(hparams.noise_multiplier, np.float64), (rounds,))
    z, counts = np.unique(schedule, return_counts=True)

    return _epsilon_slope(
        jnp.asarray(rate, float),
        jnp.asarray(z, float),
        jnp.asarray(counts, jnp.int32),
        delta,
        scheme,
        event,
    )


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


# --- over seeds -----------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """A mean over seeds.

    Attributes:
      mean: as the function returns it.
      standard_error: likewise: the sample standard deviation over the seeds, divided by √S.
    """

    mean: PyTree
    standard_error: PyTree


def map_seeds(function: Callable[[jax.Array], PyTree], keys: jax.Array) -> PyTree:
    """What a function gives for each of keys (S,), leaves (S, ...): in turn, or as one batch.

    In turn on a CPU, where a batch of whole runs gains nothing and takes S times the memory.
    """
    on_cpu = jax.default_backend() == "cpu"
    return jax.lax.map(function, keys) if on_cpu else jax.vmap(function)(keys)


def over_seeds(function: Callable[..., PyTree]) -> Callable[..., Estimate]:
    """The mean over seeds of what a function gives, with its standard error.

    The value and gradient for one key are those of the run that its cohorts, minibatches and noise
    lead to. Their means estimate, without bias, the mean over all runs and its gradient.

    Args:
      function: `(key, hparams, ...) -> pytree`, from `hypergradient` or `price_of_privacy`.

    Returns:
      A function `(keys, hparams, ...) -> Estimate` of keys (S,), S ≥ 2: one program, in which the
      seeds follow one another on a CPU, and run as one batch elsewhere. It raises ValueError as
      `function`, or if the keys are not (S,).
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


# --- checks ---------------------------------------------------------------------------------------


def check_names(
    names: Sequence[str], hparams: Hyperparameters, epsilon: ArrayLike | None = None
) -> None:
    """Checks whether there are derivatives with respect to hyperparameters of these names.

    Raises:
      ValueError: if there is none, or no such hyperparameter, if it is discrete, or if one follows
        from another.
    """
    fields = list(hparams)
    if not names:
        raise ValueError(f"wrt must name at least one of {fields}, got nothing")
    for name in names:
        if name == "sampling_rate":
            raise ValueError(
                "sampling_rate has no derivative here: it decides who takes part, which is "
                "discrete. hypergrad.epsilon_by_sampling_rate gives dε/dp; for the rest, compare "
                "runs at several p"
            )
        if name == EPSILON:
            if epsilon is None:
                raise ValueError("a derivative with respect to epsilon needs its value")
        elif name not in fields:
            near = difflib.get_close_matches(name, [*fields, EPSILON], n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"no hyperparameter {name!r}; {hint}There are {', '.join(fields)}")
    if "noise_multiplier" not in names:
        return
    if epsilon is not None:
        raise ValueError("noise_multiplier follows from epsilon, so it is not free to vary")
    clip_norm = on_host(hparams.get("clip_norm", np.inf))
    if clip_norm is not None and not np.all(np.isfinite(clip_norm)):
        raise ValueError(
            f"noise_multiplier has no derivative without a finite clip_norm, got {clip_norm}"
        )


def _check(
    simulation: Simulation, hparams: Hyperparameters, rounds: int, epsilon: ArrayLike | None
) -> None:
    """Checks whether a run can be done, as far as the hyperparameters are known."""
    if epsilon is not None:
        scheme, event = simulation.sampling.scheme, simulation.mechanism.event
        if scheme.kind not in ("poisson", "full") or event.kind != "gaussian":
            raise ValueError(
                "z(ε) is known for Gaussian noise with Poisson sampling or everyone, got a "
                f"{event.kind!r} mechanism with {scheme.kind!r} sampling"
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
    simulation.setup.check(hparams)
    if on_host(hparams.get("noise_multiplier", 0.0)) is not None:
        simulation.setup.check_rounds(hparams, 0, rounds, None)
