"""Checks of the parts of a simulation, when it is made, and of their results, when it starts.

A wrong function would otherwise fail far from where it was written, in a scatter or a scan. Results
are checked by shapes alone: the functions of a round and of an evaluation are traced once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr, tree_leaves_with_path

from fedjaxsim.algorithm import Algorithm, Context, WarmStart
from fedjaxsim.algorithms.layers import paths_of
from fedjaxsim.checks import Name, SettingError, described
from fedjaxsim.data.minibatches import ClientData, Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.engine.program import Program
from fedjaxsim.engine.purity import check_pure
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shape_bytes import multiplications_in
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.engine.work import INTEGER
from fedjaxsim.hyperparameters import Hyperparameters, per_client
from fedjaxsim.kernels import products
from fedjaxsim.kernels.primitives import ImpureError
from fedjaxsim.keys import seed_key
from fedjaxsim.models.model import STATISTICS
from fedjaxsim.own_code import code_run_by, is_stamped, kind_of, own_modules
from fedjaxsim.privacy.entries import SamplingScheme
from fedjaxsim.privacy.mechanisms import Mechanism
from fedjaxsim.privacy.messages import Messages, widened
from fedjaxsim.privacy.private_examples import PrivateExamples
from fedjaxsim.privacy.samplers import Availability, Sampler, Sampling, work_of
from fedjaxsim.tasks.task import Task

PyTree = Any
_EXAMPLES = 3
"""Rows of the batch on which a task's metrics are tried; not 1, which could be an outer axis."""
_PARTS = {
    "algorithm": (Algorithm, "pmtl(task)"),
    "warm_start": (WarmStart, "WarmStart(start, published)"),
    "task": (Task, "softmax(model, num_classes)"),
    "examples": (PrivateExamples, "private_examples(task).examples"),
    "population": (Population, "Population.from_clients(clients)"),
    "sampling": (Sampling, "poisson(0.2)"),
    "sampler": (Sampler, "poisson(0.2).for_clients(m)"),
    "scheme": (SamplingScheme, 'SamplingScheme("full", 8, 8)'),
    "availability": (Availability, "intermittent(dropout=0.1)"),
    "minibatches": (Minibatches, "Minibatches(10, epochs=1)"),
    "mechanism": (Mechanism, "gaussian()"),
}
"""The kind of each part, and an example."""


def check_part_types(**parts: Any) -> None:
    """Check the type of each named part of a simulation.

    A subclass is refused: it could answer otherwise each time it is asked, or have another cost.
    """
    for name, part in parts.items():
        kind, example = _PARTS[name]
        if kind_of(part) is not kind:
            name = name.replace("_", " ")
            raise ValueError(
                f"{name} must be of type {kind.__name__}, such as {example}, got {described(part)}"
            )
        public = getattr(part, "public", ())
        if not (isinstance(public, tuple) and all(isinstance(text, str) for text in public)):
            raise ValueError(f"the {name}'s public must be a tuple of sentences, got {public!r}")


def require_stamps(algorithm: Algorithm, mechanism: Mechanism) -> None:
    """Check that a cost belongs to its functions: parts of two records have no known cost.

    A function of a user's own is an assumption of the guarantee instead.
    """
    event, protects = mechanism.event, algorithm.example_epsilon is not None
    costs = {
        "mechanism": (mechanism, event.known or not event.releases, "event"),
        "algorithm": (algorithm, protects, "example_epsilon"),
    }
    for name, (part, has_cost, cost) in costs.items():
        if has_cost and not is_stamped(part) and not own_modules(part):
            raise ValueError(
                f"the {name} is made of parts that do not belong together, so its {cost} need not "
                "be its cost: use one as its factory returns it"
                + ", or `mechanism_of`, which finds the cost of a combination"
                * (part is mechanism)
            )


def require_state(state: Any) -> None:
    """Check that a run can go on from a state."""
    if not isinstance(state, SimulationState):
        raise ValueError(f"state must be one that init or run returned, got {described(state)}")
    is_concrete = isinstance(state.round, jax.Array) and not isinstance(state.round, Tracer)
    if is_concrete and state.round.is_deleted():
        raise ValueError(
            "the state is used up: run reuses the memory of the state that it starts from; go on "
            "from the state that it returned, or from another of init"
        )


def require_values(function: str, *trees: PyTree) -> None:
    """Check that a method that computes on the host is not traced by a transform of JAX."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees)):
        raise ValueError(
            f"{function} computes on the host, so jax.jit, jax.vmap and jax.grad cannot trace it: "
            "fjs.SimulationBatch runs several settings at once, fjs.gradients.hypergradient "
            "differentiates a run, and sim.program has the pure functions for your own loop"
        )


def require_key(key: Any) -> jax.Array:
    """Return a seed as a key, or the key; of a larger seed than 32 bits all 64 count."""
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return seed_key(int(key))
    # Other generators share one stream under vmap, which breaks noise and sampling.
    if isinstance(key, jax.Array) and str(key.dtype) == "key<fry>":
        return key
    raise ValueError(f"key must be a seed, such as 0, or jax.random.key(0), got {described(key)}")


class TracedRound(NamedTuple):
    """Shapes of one client's message and of a run's first state."""

    message: PyTree
    state: SimulationState


def trace_round(
    program: Program, rows: Rows, key: jax.Array, hparams: Hyperparameters, *, pure: bool = True
) -> TracedRound:
    """Check the results of all functions of one client, and return what they are made of.

    They are traced with `rows` as shapes. If `pure`, they must have no way to other clients, and
    the traces of `TracedOnce` are those that a round on one device evaluates.
    """
    messages = []

    def a_round(key, hparams, rows, round_, client_id):
        data = _view(program, rows, key, round_, client_id)
        messages.append(_a_round(program, key, hparams, data, round_, client_id))

    traced = jax.make_jaxpr(a_round)(key, hparams, rows, *[INTEGER] * 2)
    if pure:
        check_pure(traced)
    try:
        state = jax.eval_shape(program.init, key, hparams)
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
        names = ", ".join(per_client(program.algorithm.hyperparameters, hparams))
        raise ValueError(
            f"init must return a server state that depends on no client: {names} has a value for "
            "each, which only the personal state may follow"
        ) from error
    return TracedRound(messages[0], state)


def operations(program: Program, rows: Rows, hparams: Hyperparameters, most_rows: int) -> int:
    """Count the multiplications of a round of a client with `most_rows` rows.

    `rows` are shapes. After `trace_round` it evaluates the client's trace and makes no other.
    """
    key, algorithm = seed_key(0), program.algorithm

    def a_round(key, hparams, rows, states, round_, client_id):
        data = _view(program, rows, key, round_, client_id)
        context = Context(round_, key, client_id, program.num_clients, jnp.ones(()))
        shared, personal = states
        algorithm.client(shared, personal, data, hparams, context)

    states = jax.eval_shape(algorithm.init, key, hparams, jnp.int32(0))
    traced = jax.make_jaxpr(a_round)(key, hparams, rows, states, *[INTEGER] * 2)
    return multiplications_in(traced.jaxpr, most_rows)


def _view(
    program: Program, rows: Rows, key: jax.Array, round_: jax.Array, client_id: jax.Array
) -> ClientData:
    """Return the view of a client in a round."""
    consumed = jnp.int32(0) if program.consumes else None
    availability, share = program.sampling.availability, None
    if availability is not None:
        share = work_of(availability, key, round_, client_id)
        if jnp.shape(share) != () or not jnp.issubdtype(_dtype(share), jnp.floating):
            raise ValueError(
                f"work must return the share of a client's steps, a float, got {_shape(share)}"
            )
    reading = program.plan.reading
    return rows.of(client_id, key, program.minibatches, reading, consumed, key, share)


def _a_round(
    program: Program,
    key: jax.Array,
    hparams: Hyperparameters,
    data: ClientData,
    round_: jax.Array,
    client_id: jax.Array,
) -> PyTree:
    """Run one client's round, checking each result; return its message."""
    algorithm, mechanism, m = program.algorithm, program.mechanism, program.num_clients
    shared, personal = _several("init", algorithm.init(key, hparams, client_id), "shared, personal")
    _require_arrays("init", "a server state", shared, numbers=True)
    _require_arrays("init", "personal states", personal)
    context = Context(round_, key, client_id, m, jnp.ones(()))
    returned = algorithm.client(shared, personal, data, hparams, context)
    personal_after, message, metrics = _several("client", returned, "personal, message, metrics")
    _require_alike("client", "a personal state", personal, personal_after)
    message = _message(message, mechanism)
    kept_apart = algorithm.task.track is None or algorithm.averages_statistics
    if not kept_apart and any(STATISTICS in path.split("/") for path in paths_of(message)):
        raise ValueError(
            "the model keeps running statistics (BatchNorm), which this algorithm would send "
            "with all parameters and cannot average: use fedavg without noise, or fedbn, "
            "fedper, fedrep, dpfedmtl or local, which keep them with their clients"
        )
    if not isinstance(metrics, dict):
        raise ValueError(
            "client must return metrics as a dict of scalars, {} for none, "
            f"got {described(metrics)}"
        )
    for name, value in metrics.items():
        number = hasattr(value, "dtype") or isinstance(value, (int, float))
        if not number or np.shape(value) != ():
            raise ValueError(
                f"client must return scalar metrics, got {described(value)} for {name!r}"
            )
    predicted = algorithm.predict(shared, personal, hparams, client_id)
    if algorithm.predict_with_data is not None:
        predicted = algorithm.predict_with_data(shared, personal, data, hparams, client_id)
    _check_evaluation(algorithm.task, key, predicted, data)
    zero, public = mechanism.zero(message, m), mechanism.init(hparams)
    if own_modules(mechanism.add):
        sent = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), message)
        mask_and_ids = jnp.ones(1, bool), jnp.zeros(1, jnp.int32)
        added = mechanism.add(zero, Messages(sent), *mask_and_ids, public, hparams)
        _require_alike("add", "an accumulator", zero, added)
    if own_modules(program.sampling.draw):
        program.sampling.draw(key, round_, hparams)
    release = mechanism.release(zero, jnp.ones(()), key, public, hparams, round_).value
    try:
        served = algorithm.server(shared, release, hparams, round_)
    except ValueError as error:
        if "pytree" not in str(error) or jax.tree.structure(release) == jax.tree.structure(shared):
            raise
        raise ValueError(
            f"server fails on a release of the message's structure, {jax.tree.structure(release)}: "
            f"its state has {jax.tree.structure(shared)}, and client must send what server reads"
        ) from error
    _require_alike("server", "a server state", shared, served, cast=True)
    return message


def _several(function: str, returned: Any, names: str) -> Any:
    """Return a function's results if they are a tuple with one value per name."""
    wanted = len(names.split(", "))
    plain = isinstance(returned, (tuple, list)) and not hasattr(returned, "_fields")
    if not plain or len(returned) != wanted:
        got = f"{len(returned)} values" if plain else described(returned)
        raise ValueError(f"{function} must return {wanted} values, ({names}), got {got}")
    return returned


def _require_arrays(function: str, what: str, tree: PyTree, *, numbers: bool = False) -> None:
    """Check that a result holds arrays alone, or Python's `numbers`, too."""
    for path, leaf in tree_leaves_with_path(tree):
        is_number = isinstance(leaf, (bool, int, float))
        if isinstance(leaf, (jax.Array, np.ndarray, products.Sealed)) or (numbers and is_number):
            continue
        hint = "" if is_number else ": a class becomes a pytree by jax.tree_util.register_dataclass"
        raise ValueError(
            f"{function} must return {what} of arrays, got {described(leaf)}{_at(path)}{hint}"
        )
    _require_plain(function, what, tree)


def _require_plain(function: str, what: str, tree: PyTree) -> None:
    """Check that no code of a user runs where a result is taken apart or put together.

    The engine does both with arrays of all clients, outside of any trace.
    """
    leaves, structure = jax.tree.flatten(tree)
    code = code_run_by(lambda: jax.tree.leaves(jax.tree.unflatten(structure, leaves)))
    if code is not None:
        raise ImpureError(
            f"{function} must return {what} of tuples, dicts or classes that JAX takes apart, "
            "such as dataclasses without __post_init__ after jax.tree_util.register_dataclass: "
            f"{code} would see all clients' arrays"
        )


def _require_alike(
    function: str, what: str, expected: PyTree, got: PyTree, *, cast: bool = False
) -> None:
    """Check that a result has the structure, shapes and types of the input.

    With `cast` one floating type may stand for another, as the engine casts it back.
    """
    if jax.tree.structure(expected) != jax.tree.structure(got):
        raise ValueError(
            f"{function} must return {what} of the structure it was given, "
            f"{jax.tree.structure(expected)}, got {jax.tree.structure(got)}"
        )
    of_both = zip(tree_leaves_with_path(expected), jax.tree.leaves(got), strict=True)
    for (path, before), after in of_both:
        floats = all(jnp.issubdtype(_dtype(x), jnp.floating) for x in (before, after))
        casts = cast and floats and np.shape(before) == np.shape(after)
        if _shape(before) != _shape(after) and not casts:
            raise ValueError(
                f"{function} must return {what} of the shapes it was given: "
                f"{_shape(before)}{_at(path)}, got {_shape(after)}"
            )


def _message(message: PyTree, mechanism: Mechanism) -> PyTree:
    """Check that the mechanism can bound the message, and that there is one."""
    if message is None:
        raise ValueError("client must return the message () where nothing is sent, got None")
    _require_arrays("client", "a message", message)
    sends, releases = bool(jax.tree.leaves(message)), mechanism.event.releases
    if sends and not releases:
        raise SettingError(
            "the algorithm sends messages, which ",
            Name("no_release()"),
            " would lose: use ",
            Name("gaussian()"),
        )
    if releases and not sends:
        raise SettingError(
            "the algorithm sends nothing, so it takes ",
            Name("no_release()"),
            ": any other mechanism would be charged for releasing nothing",
        )
    return products.shapes(widened(message))


def _check_evaluation(task: Task, key: jax.Array, params: PyTree, data: ClientData) -> None:
    """Check that the task takes the predicting parameters and gives a value per example."""
    batch = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), data.batch_shapes(_EXAMPLES)
    )
    try:
        values = task.metrics(params, batch)
    except Exception as error:
        model = jax.eval_shape(task.init, key)
        if _shapes_of(params) == _shapes_of(model):
            raise
        raise ValueError(
            f"predict must return params that the task takes, such as {_shapes_of(model)}, "
            f"got {_shapes_of(params)}"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(
            f"the task's metrics must be a dict of per-example values (b,), got {described(values)}"
        )
    for name, metric in task.streaming_metrics.items():
        if name in values:
            raise ValueError(f"{name!r} must be a metric or a streaming metric, and is both")
        carry = metric.start(_EXAMPLES)
        after = metric.add(carry, params, batch)
        _require_alike(f"add of the streaming metric {name!r}", "a carry", carry, after)
        if (shape := np.shape(metric.value(after))) != ():
            raise ValueError(
                f"value of the streaming metric {name!r} must be one number, got shape {shape}"
            )
    task.metric_records(values)
    if task.targets is not None:
        values = values | {"targets": task.targets(batch.fields)}
    for name, value in values.items():
        if jnp.shape(value) != (_EXAMPLES,):
            raise ValueError(
                f"the task's metrics must be per-example values, of shape ({_EXAMPLES},) for "
                f"{_EXAMPLES} rows, got {name!r} of shape {jnp.shape(value)}"
            )


def require_same_shapes(what: str, wanted: PyTree, got: PyTree) -> None:
    """Check that given states have the shapes of the simulation's states."""
    alike = jax.tree.structure(wanted) == jax.tree.structure(got)
    if not alike or [*map(_shape, jax.tree.leaves(wanted))] != [*map(_shape, jax.tree.leaves(got))]:
        raise ValueError(
            f"the {what} must be {_shapes_of(wanted)} to go on from, got {_shapes_of(got)}"
        )


def _at(path: Any) -> str:
    """Return the path of a leaf in words; nothing for a single leaf."""
    return f" at {keystr(path)}" if path else ""


def _shape(leaf: Any) -> str:
    return f"{_dtype(leaf)}{list(np.shape(leaf))}"


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def _shapes_of(tree: PyTree) -> str:
    leaves = [f"{_shape(leaf)}{_at(path)}" for path, leaf in tree_leaves_with_path(tree)]
    few = leaves if len(leaves) <= 4 else [*leaves[:4], "…"]
    return ", ".join(few) or "nothing"
