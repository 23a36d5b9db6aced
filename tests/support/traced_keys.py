"""The keys of a traced program: what each is derived from, and every use of it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.extend.core
import numpy as np

_HASHES = {"words", "hash_in_a_loop", "_hash_short"}
"""Names of the compiled Threefry, and of the one in its place in tests."""
_SEEN = "seen_by_a_client"
_CALLS = {
    "pjit", "jit", "closed_call", "checkpoint", "custom_jvp_call", "custom_vjp_call",
    "custom_vmap_call",
}  # fmt: skip
_MOVES = {
    "slice", "squeeze", "reshape", "broadcast_in_dim", "concatenate", "stack", "transpose",
    "gather", "dynamic_slice", "select_n", "random_wrap", "random_unwrap", "row", "pvary",
    "optimization_barrier",
}  # fmt: skip
"""Operations that move the words of keys, and compute none."""
_OF_JAX = {"random_bits", "random_fold_in", "random_split", "random_gamma"}
_LARGE = 1000
"""Constants of so many numbers are none that a hash reads."""


@dataclasses.dataclass(frozen=True, eq=False)
class Term:
    """An operation on terms or constants, or an input. Equal terms are one object.

    Terms share their inputs, so text with all inputs of inputs would never end.
    """

    name: str
    params: str
    inputs: tuple = dataclasses.field(repr=False)


class Step(NamedTuple):
    """The derivation of a key from another: by a stream's name, 0 of `jax.random`, and numbers."""

    name: int
    numbers: Any

    def __eq__(self, other):
        """Numbers are constants, or terms, which are equal if they are one object."""
        same = self.numbers is other.numbers or (
            isinstance(self.numbers, np.ndarray)
            and isinstance(other.numbers, np.ndarray)
            and np.array_equal(self.numbers, other.numbers)
        )
        return self.name == other.name and same

    def __hash__(self):
        return hash(self.name)


class Use(NamedTuple):
    """A hash of a key: of the numbers of a stream, or for random bits if the name is 0."""

    key: Any
    name: int
    numbers: Any


class Keys:
    """All uses of keys in a function, loops and branches included; `seen`: those marked."""

    def __init__(self, function, *args):
        self.uses: list[Use] = []
        self.seen: list[tuple[str, Any]] = []
        self._terms: dict[Any, Term] = {}
        self._loops = 0
        self._paths: dict[int, tuple[Step, ...] | None] = {}
        closed = jax.make_jaxpr(function)(*args)
        self._run(closed, [self._term("input", str(k)) for k in range(len(closed.jaxpr.invars))])

    def path(self, key) -> tuple[Step, ...] | None:
        """How a key is derived from the function's; None if it is not, such as a constant."""
        if id(key) not in self._paths:
            self._paths[id(key)] = self._path(key)
        return self._paths[id(key)]

    def _path(self, key):
        place = None
        while isinstance(key, Term) and (key.name in _MOVES or key.name.startswith("unstack")):
            if key.name.startswith("unstack"):  # of JAX 0.12, with the number of its output
                place = int(key.name.removeprefix("unstack") or 0)
            if key.name == "slice":
                starts = key.params.partition("'start_indices', (")[2].partition(")")[0]
                place = max(int(start) for start in starts.split(",") if start)
            inputs = key.inputs[::-1] if key.name == "select_n" else key.inputs
            key = next((value for value in inputs if isinstance(value, Term)), None)
        if key is None or key.name not in ("hash", "input", *_OF_JAX):
            return None
        if key.name == "input":
            return ()
        before = self.path(key.inputs[0])
        if before is None or key.name in _OF_JAX:
            return before and (*before, Step(0, key))
        _, names, numbers = key.inputs
        assert isinstance(names, np.ndarray), "random bits are no key"
        several = len({*np.ravel(names).tolist()}) > 1
        assert place is not None or not several
        step = Step(int(np.ravel(names)[place if several else 0]), self._at(numbers, place))
        return (*before, step)

    def sources(self, term) -> set[Term]:
        """Inputs, and other terms without inputs, that a term is computed from."""
        visited, waiting, found = set(), [term], set()
        while waiting:
            term = waiting.pop()
            before = {value for value in term.inputs if isinstance(value, Term)} - visited
            visited |= before
            waiting += before
            if not any(isinstance(value, Term) for value in term.inputs):
                found.add(term)
        return found

    def _at(self, numbers, place):
        return numbers.inputs[place] if getattr(numbers, "name", "") == "stack" else numbers

    def _term(self, name, params="", *inputs):
        places = [
            (str(v.dtype), v.shape, v.tobytes()) if isinstance(v, np.ndarray) else id(v)
            for v in inputs
        ]
        return self._terms.setdefault((name, params, *places), Term(name, params, inputs))

    def _constant(self, value):
        typed = hasattr(value, "dtype") and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
        if typed or np.size(value) >= _LARGE:
            return self._term("constant", str(id(value)))
        return np.asarray(value)

    def _run(self, closed, inputs):
        jaxpr = closed.jaxpr if hasattr(closed, "consts") else closed
        constants = map(self._constant, getattr(closed, "consts", ()))
        values = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*inputs, *constants), strict=True))

        def read(variable):
            literal = isinstance(variable, jax.extend.core.Literal)
            return self._constant(variable.val) if literal else values[variable]

        for equation in jaxpr.eqns:
            results = self._apply(equation, [read(variable) for variable in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def _apply(self, equation, inputs):
        name, params, outputs = equation.primitive.name, equation.params, equation.outvars
        called = str(params.get("name")) if name in ("pjit", "jit") else ""
        if called in _HASHES:
            key, names, numbers = inputs
            if not isinstance(names, np.ndarray):  # rows of random bits, none of which has a name
                names = np.zeros(1, np.uint32)
            for place, stream in enumerate(np.unique(names).tolist()):
                self.uses.append(Use(key, stream, self._at(numbers, place)))
            return [self._term("hash", str(k), *inputs) for k in range(2)]
        if called.startswith(_SEEN):
            self.seen.extend((called, key) for key in inputs)
            return inputs
        if name in _OF_JAX:
            self.uses.append(Use(inputs[0], 0, name))
        if name == "random_unwrap" and getattr(inputs[0], "name", "") == "random_wrap":
            return [inputs[0].inputs[0]]
        if name == "scan":
            return self._scan(params, inputs)
        if name == "while":
            return self._while(params, inputs)
        if name == "cond":
            results = zip(*(self._run(b, inputs[1:]) for b in params["branches"]), strict=True)
            return [
                values[0] if len({*map(id, values)}) == 1 else self._term("select_n", "", *values)
                for values in results
            ]
        if name in _CALLS:
            bodies = (v for v in params.values() if hasattr(v, "eqns") or hasattr(v, "jaxpr"))
            return self._run(next(bodies), inputs)
        if name in ("broadcast_in_dim", "convert_element_type") and isinstance(
            inputs[0], np.ndarray
        ):
            aval = outputs[0].aval
            if inputs[0].size == 1 and aval.size < _LARGE:
                return [np.full(aval.shape, inputs[0].reshape(()), aval.dtype)]
            if inputs[0].shape == aval.shape[-inputs[0].ndim :] and aval.size < _LARGE:
                return [np.broadcast_to(inputs[0], aval.shape).astype(aval.dtype)]
        words = str(sorted(params.items(), key=str)) if params else ""
        return [self._term(f"{name}{k or ''}", words, *inputs) for k in range(len(outputs))]

    def _scan(self, params, inputs):
        closed, (consts, carried) = params["jaxpr"], _counts(params)
        first, start = inputs[:consts], inputs[consts : consts + carried]
        rows = [self._term("row", "", row) for row in inputs[consts + carried :]]
        carry = self._carry(closed.jaxpr, consts, start)
        after = self._run(closed, [*first, *carry, *rows])
        stacked = [self._term("stacked", str(self._loops), value) for value in after[carried:]]
        return carry + stacked

    def _while(self, params, inputs):
        counts = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        of_condition, of_body = inputs[: counts[0]], inputs[counts[0] : counts[1]]
        body = params["body_jaxpr"]
        carry = self._carry(body.jaxpr, len(of_body), inputs[counts[1] :])
        self._run(params["cond_jaxpr"], [*of_condition, *carry])
        self._run(body, [*of_body, *carry])
        return carry

    def _carry(self, jaxpr, consts, start):
        """Return what a loop carries; what its body hands on as it is stays what it was."""
        self._loops += 1
        before, after = jaxpr.invars[consts : consts + len(start)], jaxpr.outvars[: len(start)]
        return [
            value if first is last else self._term("carried", f"{self._loops} {k}", value)
            for k, (value, first, last) in enumerate(zip(start, before, after, strict=True))
        ]


def _counts(params) -> tuple[int, int]:
    """Return how many inputs of a scan are constants, and how many it carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = params["ft_in"].unpack()  # since JAX 0.12
    return len(consts), len(carried)


def mark(role, key):
    """Note, in a function that `Keys` traces, that a client's function sees a key."""

    def seen(words):
        return words

    seen.__name__ = f"{_SEEN} {role}"
    jax.jit(seen)(jax.random.key_data(key))
