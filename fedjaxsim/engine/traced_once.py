"""Functions of users, each traced once: the trace that is checked is the trace that runs.

A function of Python may do one thing while it is checked and another while it runs: it may read a
flag, an array that is filled later, the names of devices, or the values behind tracers. So the
engine calls no such function. It traces the function by itself, for inputs of given shapes, copies
the constants of the trace, checks it, and from then on evaluates it, mapped, divided over devices,
streamed or batched. Inputs of other shapes make another trace, which is checked before it runs.

A client's rows enter by one primitive, `read_rows`, whose arrays no other equation may use.
"""

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.data.contained_rows import FieldHashes
from fedjaxsim.data.minibatches import ClientData, parts_of_view, view_of_parts
from fedjaxsim.data.population import Population
from fedjaxsim.engine.purity import (
    Captured,
    check_captured,
    check_pure,
    check_repeats,
    with_own_constants,
)
from fedjaxsim.kernels import backend
from fedjaxsim.kernels.products import Product, Sealed
from fedjaxsim.kernels.read_rows import check_reads
from fedjaxsim.models.model import FrozenWeights, bind_weights
from fedjaxsim.own_code import own_modules
from fedjaxsim.privacy.mechanisms import Mechanism
from fedjaxsim.privacy.messages import Messages
from fedjaxsim.privacy.samplers import Sampler

PyTree = Any
_SETTINGS = "jax_default_matmul_precision", "jax_enable_x64"
"""JAX's settings on which a trace depends."""


class _Parts(NamedTuple):
    """A tree taken apart: arrays, what else there is, hashable, and the function that joins both.

    `views` have the places, among the arrays, of what each client's view reads.
    """

    arrays: list[Any]
    kind: Any
    join: Callable[[list[Any]], PyTree]
    views: list[range]


class TracedOnce:
    """The traces of a run's functions, and the populations whose rows none of them may hold.

    Attributes:
      captured: the frozen weights, and the arrays that the functions traced so far close over.
    """

    def __init__(self, frozen: FrozenWeights | None, *, unchecked: bool = False):
        """Keep the traces of functions that read `frozen` weights; if `unchecked`, keep none."""
        weights = () if frozen is None or unchecked else jax.tree.leaves(frozen.weights)
        self.captured: list[Captured] = [(np.asarray(leaf), "the model") for leaf in weights]
        self._frozen, self._unchecked = frozen, unchecked
        # Populations, with the hashes of their fields so far.
        self._populations = weakref.WeakKeyDictionary[Population, FieldHashes]()

    def watch(self, population: Population) -> None:
        """Refuse traces, those so far included, that hold rows of a population."""
        if not self._unchecked:
            hashes = self._populations.get(population, {})
            check_captured(self.captured, population.fields, hashes)
            self._populations[population] = hashes

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of arrays, views and static values that evaluates its own trace."""
        if self._unchecked:
            return function
        traces: dict[Any, _Trace] = {}

        @functools.wraps(function)
        def evaluated(*args):
            weights = None if self._frozen is None else self._frozen.argument.get()
            parts = _taken_apart((args, weights))
            settings = (jax.config.values[name] for name in _SETTINGS)
            mesh = jax.sharding.get_abstract_mesh()  # a trace belongs to its axes of devices
            kind = parts.kind, *settings, backend.platform(), mesh
            if kind not in traces:
                # The package's own functions hold no numbers of the host that change.
                repeat = not traces and bool(own_modules((function, parts.kind)))
                traces[kind] = self._traced(function, parts, repeat=repeat)
            return traces[kind].evaluate(parts.arrays)

        return evaluated

    def algorithm(self, algorithm: Algorithm) -> Algorithm:
        """Return an algorithm of a run, with its task, whose functions are traced once."""
        task, warm_start = algorithm.task, algorithm.warm_start
        with_data, epsilon = algorithm.predict_with_data, algorithm.example_epsilon
        return algorithm._replace(
            init=self.of(algorithm.init),
            client=self.of(algorithm.client),
            server=self.of(algorithm.server),
            predict=self.of(algorithm.predict),
            predict_with_data=with_data and self.of(with_data),
            example_epsilon=epsilon and self.of(epsilon),
            warm_start=warm_start._replace(
                start=warm_start.start and self.of(warm_start.start),
                published=self.of(warm_start.published),
            ),
            task=task._replace(
                targets=task.targets and self.of(task.targets),
                predict=task.predict and self.of(task.predict),
            ),
        )

    def mechanism(self, mechanism: Mechanism) -> Mechanism:
        """Return a mechanism whose functions are traced once."""
        names = "init", "zero", "add", "release"
        return mechanism._replace(**{name: self.of(getattr(mechanism, name)) for name in names})

    def sampler(self, sampler: Sampler) -> Sampler:
        """Return a sampler whose functions are traced once."""
        availability = sampler.availability
        return sampler._replace(
            draw=self.of(sampler.draw),
            rate=self.of(sampler.rate),
            availability=availability and availability._replace(work=self.of(availability.work)),
        )

    def _traced(self, function, parts: _Parts, *, repeat: bool) -> "_Trace":
        shapes = [_shape_of(leaf) for leaf in parts.arrays]

        def of_arrays(arrays):
            args, weights = parts.join(arrays)
            with bind_weights(self._frozen, weights):
                return function(*args)

        made = _Trace.of(of_arrays, shapes)
        if repeat:
            again = _Trace.of(of_arrays, shapes)
            check_repeats(function, made.jaxpr, again.jaxpr, (made.numbers, again.numbers))
        check_reads(made.jaxpr.jaxpr, parts.views)
        return made._replace(jaxpr=self._checked(made.jaxpr))

    def _checked(self, closed: Any) -> Any:
        """Check a trace, of a function or of a rule of its derivative; return the one that runs."""
        captured = check_pure(closed)
        for population, hashes in list(self._populations.items()):
            check_captured(captured, population.fields, hashes)
        self.captured += captured
        return with_own_constants(closed, self._checked)


class _Trace(NamedTuple):
    """A function as a jaxpr; `join` makes its results of arrays, and of its Python `numbers`."""

    jaxpr: Any
    join: Callable[[list[Any]], Any]
    numbers: list[Any]

    @classmethod
    def of(cls, function: Callable[[list[Any]], Any], shapes: list[Any]) -> "_Trace":
        """Trace a function of a list of arrays."""
        results, numbers = [], []

        def flat(*arrays):
            result = function(list(arrays))
            numbers.extend(n for n in jax.tree.leaves(result) if isinstance(n, int | float))
            results.append(_taken_apart(result))
            return results[0].arrays

        return cls(jax.make_jaxpr(flat)(*shapes), results[0].join, numbers)

    def evaluate(self, arrays: list[Any]) -> Any:
        """Return the function's results, in whatever trace JAX is."""
        return self.join(jaxpr_as_fun(self.jaxpr)(*arrays))


def _shape_of(array: Any) -> jax.ShapeDtypeStruct:
    aval: Any = jax.typeof(array)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _taken_apart(tree: PyTree) -> _Parts:
    """Take a tree apart, whose leaves may be views, sealed products, messages, and static values.

    Equal static values have the same trace.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays, kinds, joins, views = [], [], [], []
    for leaf in leaves:
        inside, kind, join = _leaf_apart(leaf)
        if isinstance(leaf, ClientData):
            views.append(range(len(arrays), len(arrays) + len(leaf._read.fields) + 2))
        arrays += inside
        kinds.append(kind)
        joins.append((len(inside), join))

    def joined(values: list[Any]) -> PyTree:
        remaining = iter(values)
        made = [join(list(itertools.islice(remaining, count))) for count, join in joins]
        return jax.tree.unflatten(structure, made)

    shapes = [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in map(_shape_of, arrays)]
    return _Parts(arrays, (structure, *kinds, *shapes), joined, views)


def _leaf_apart(leaf: Any) -> tuple[list[Any], Any, Callable[[list[Any]], Any]]:
    """Return a leaf's arrays, what else it has, hashable, and the function that joins both."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)], None, lambda a: a[0]
    if isinstance(leaf, Sealed):
        product = leaf.product
        return [product.left, product.right], Sealed, lambda arrays: Sealed(Product(*arrays))
    if isinstance(leaf, Messages):
        return _tree_apart(leaf._tree, Messages, Messages)
    if isinstance(leaf, ClientData):
        parts, settings = parts_of_view(leaf)
        return _tree_apart(parts, settings, lambda parts: view_of_parts(parts, settings))
    return [], (type(leaf), leaf), lambda _: leaf


def _tree_apart(
    tree: PyTree, kind: Any, make: Callable[[PyTree], Any]
) -> tuple[list[Any], Any, Callable[[list[Any]], Any]]:
    arrays, structure = jax.tree.flatten(tree)
    return arrays, (structure, kind), lambda values: make(jax.tree.unflatten(structure, values))
