"""The data of one client: minibatches, of protected examples too, a fold over them, an exact pass.

All clients' rows are in one flat array per field; a client owns `start : start + count`. Batches
are gathers by index inside the step, so no client is padded to the largest one's size, and a client
with few rows stops early.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from fedjaxsim import checks, keys
from fedjaxsim.kernels import backend, threefry
from fedjaxsim.kernels.forward_only import forward_only
from fedjaxsim.kernels.permutation import Order, random_order
from fedjaxsim.kernels.read_rows import read_rows
from fedjaxsim.kernels.traces import current_trace, note, noted_losses
from fedjaxsim.keys import Stream

Carry = TypeVar("Carry")
PyTree = Any
Reader = Callable[[jax.Array], dict[str, jax.Array]]
"""(positions among one client's rows) -> the fields of these rows."""
Generate = Callable[[jax.Array, dict[str, jax.Array], int], dict[str, jax.Array]]
"""(key, a client's row of each field, b) -> the fields (b, ...) of a fresh minibatch."""
Protection = Any
"""The part of `private_examples` that draws minibatches (`sample`, `read`) and computes noised
gradients (`gradient`); None without."""

PASS_SIZE = 16
"""Most rows in a batch of an exact pass; fewer if the public bound on a client's rows is less."""
_UNROLLED = 4
"""Most local steps that an accelerator's program writes out."""
_DRAWN_AT_ONCE = 2**16
"""Most coins of a client's protected minibatches that are tossed before the first step."""


class Batch(NamedTuple):
    """A minibatch with static shapes.

    Attributes:
      fields: a dict of (b, ...): "x" and "y" by convention.
      weight: (b,) float, 1 for an example and 0 for padding (the last batch may be partial).
      keys: (b,) typed keys of the examples, for random layers and augmentation, of the client, the
        round and the step; None in exact passes, where nothing is random.

    Example:
      >>> batch = fjs.Batch({"y": jnp.array([1.0, 3.0, 9.0])}, weight=jnp.array([1.0, 1.0, 0.0]))
      >>> float(batch.mean(batch.fields["y"]))  # 9 is padding
      2.0
    """

    fields: dict[str, jax.Array]
    weight: jax.Array
    keys: jax.Array | None = None

    @property
    def examples(self) -> jax.Array:
        """The number of examples in a mean over the minibatch, ()."""
        return jnp.sum(self.weight)

    def gradient(self, task: Any, params: PyTree) -> PyTree:
        """Compute `Task.gradient`."""
        value, gradient = value_and_gradient(task, params, self)
        note(value)
        return gradient

    def sum(self, values: jax.Array) -> jax.Array:
        """Sum per-example `values` (b,) over the real examples, (); ValueError for other shapes."""
        values = self.per_example(values)
        weight = self.weight.astype(values.dtype)
        return jnp.sum(jnp.where(weight > 0, weight * values, 0))

    def mean(self, values: jax.Array) -> jax.Array:
        """Average per-example `values` (b,) over the real examples, () (0 if none).

        Raises:
          ValueError: for values of other shapes, against which weights would broadcast.
        """
        total = self.sum(values)
        return total / jnp.maximum(jnp.sum(self.weight), 1.0).astype(total.dtype)

    def per_example(self, values: jax.Array, what: str = "values") -> jax.Array:
        """Return `values` if they are one number for each example, (b,)."""
        if jnp.shape(values) != self.weight.shape:
            raise ValueError(
                f"{what} must be one number per example, of shape {self.weight.shape}, got "
                f"{jnp.shape(values)}: take [:, 0] of a single column, or sum over the other axes"
            )
        return jnp.asarray(values)


def value_and_gradient(task: Any, params: PyTree, batch: Batch) -> tuple[jax.Array, PyTree]:
    """Compute a task's loss, which must be one number, and its gradient."""

    def loss(params):
        value = task.loss(params, batch)
        if shape := jnp.shape(value):
            raise ValueError(f"the task's loss must be one number, got shape {shape}")
        return value

    return jax.value_and_grad(loss)(params)


class ExampleLeakError(ValueError):
    """A use of a client's rows that noise in gradients does not protect."""


class ProtectedBatch:
    """A minibatch of protected examples: `Task.gradient` is its one use, where it was drawn.

    It has no rows, counts or weights. Each gradient takes the next ticket, which is charged and
    draws its own noise; the noised sum is divided by the expected, public number of `examples`, ().
    """

    __slots__ = ("_gradient", "_loss", "_trace", "examples")

    def __init__(
        self,
        protection: Protection,
        sampled: Any,
        rows: Reader | Batch,
        first: int,
        took: Callable[[int], None],
    ):
        """Make the minibatch in the current trace; `took` gets the tickets so far, per gradient."""
        tickets, losses = itertools.count(first), []

        def gradient(task, params):
            ticket = next(tickets)
            took(ticket + 1)
            value, protected = protection.gradient(task, params, sampled, rows, ticket)
            losses.append(value)
            return protected

        made = {"_trace": current_trace(), "_gradient": gradient, "examples": sampled.expected}
        for name, value in (made | {"_loss": lambda: losses[0] if losses else None}).items():
            object.__setattr__(self, name, value)

    def gradient(self, task: Any, params: PyTree) -> PyTree:
        """Compute `Task.gradient`.

        Raises:
          ExampleLeakError: elsewhere than directly in the step that got the minibatch.
        """
        if current_trace() != self._trace:
            raise ExampleLeakError(
                "a gradient of protected examples must be taken directly in the step of data.fold, "
                "where it is counted once: not inside jit, checkpoint, vmap, grad, cond or a loop "
                "(a loop over one minibatch is a Python loop)"
            )
        return self._gradient(task, params)

    if not TYPE_CHECKING:

        def __setattr__(self, name, value):
            raise AttributeError(f"a minibatch of protected examples keeps its {name!r}")

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            raise ExampleLeakError(
                f"a minibatch of protected examples has no {name!r}: its one use is "
                "task.gradient(params, batch), and the engine reports the loss"
            )


NO_REVERSE = (
    "jax.grad needs a bound on the rows of every client, as a loop over epochs, over all rows of a "
    "client or over an accelerator's batches has no fixed length: differentiate the rounds of "
    'fjs.gradients.Reverse().program(sim.program, sim.rows["train"]) and the objective '
    "fjs.gradients.mean_metric(sim) in place of evaluate, or a whole run by "
    "fjs.gradients.hypergradient"
)


class BatchReadOptions(NamedTuple):
    """Options for speed and derivatives; they change no result beyond rounding.

    Attributes:
      most_rows: an upper bound on the rows of every client. It makes loops over a client's rows
        static, so that reverse mode applies to them.
      cuts_halves: whether a batch that is at most half full is computed at half the size. It saves
        time only if clients run one after another: under `jax.vmap` both sizes would be computed.
    """

    most_rows: int | None = None
    cuts_halves: bool = False


@dataclasses.dataclass(frozen=True)
class Minibatches:
    """The number of a client's minibatches in a round, and the way they are drawn.

    Exactly one of `steps` and `epochs` is given.

    Attributes:
      size: b, the examples in a batch.
      steps: E local steps, each on a batch drawn uniformly with replacement.
      epochs: passes over the client's rows, each in a fresh random order without replacement:
        epochs·⌈n_k/b⌉ steps, the last batch of a pass partial.
      passes: with `steps`, batches are consumed without replacement instead: over the whole run a
        client makes `passes` passes over its rows, each in a fresh random order, and then takes no
        more steps.

    Example:
      >>> fjs.Minibatches(10, epochs=1)  # a client with 25 rows takes 3 steps
      Minibatches(size=10, steps=None, epochs=1, passes=None)
      >>> fjs.Minibatches(10)
      Traceback (most recent call last):
      ValueError: give either steps or epochs, got steps=None and epochs=None
    """

    size: int
    steps: int | None = None
    epochs: int | None = None
    passes: int | None = None

    def __post_init__(self):
        checks.count(**{"batch size": self.size})
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"give either steps or epochs, got steps={self.steps} and epochs={self.epochs}"
            )
        if self.passes is not None and self.steps is None:
            raise ValueError(f"passes need steps, the batches of one round, got {self}")
        for name in ("steps", "epochs", "passes"):
            value = getattr(self, name)
            if value is not None:
                checks.count(**{f"local {name}": value})


class RowReader(NamedTuple):
    """A function that reads `length` rows from `start` on of all clients' `fields`, no others.

    A trace in which the arrays serve anything else is refused; see `kernels/read_rows.py`.
    """

    fields: Mapping[str, jax.Array]
    start: jax.Array
    length: jax.Array

    def __call__(self, position: jax.Array) -> dict[str, jax.Array]:
        """Read the rows at positions (b,), which are clamped; each field is (b, ...)."""
        names = sorted(self.fields)
        values = [self.fields[name] for name in names]
        rows = read_rows(position, values, self.start, self.length)
        return dict(zip(names, rows, strict=True))


class ClientData:
    """One client's view of its rows in one split.

    The view has no arrays, only a function that clamps every position to the client's rows: no
    member reads another client's. It is no pytree: a function that is mapped or checkpointed closes
    over it.

    Attributes:
      count: number of rows of the client, () int32.
      most_rows: a static, public bound on `count`, 0 if there is none; see `Population.max_rows`.
      minibatches: static settings of `fold`.
      tickets: gradients that its minibatches have given so far, if they protect examples.
    """

    __slots__ = (
        "_consumed", "_generate", "_key", "_loss", "_options", "_orders", "_protection", "_read",
        "_share", "_trace", "count", "minibatches", "most_rows", "tickets",
    )  # fmt: skip

    def __init__(
        self,
        read: Reader,
        count: jax.Array,
        key: jax.Array,
        minibatches: Minibatches,
        consumed: jax.Array | None = None,
        order: jax.Array | None = None,
        generate: Generate | None = None,
        options: BatchReadOptions = BatchReadOptions(),  # noqa: B008
        share: jax.Array | None = None,
        most_rows: int = 0,
        protection: Protection = None,
    ):
        """Make the view of a client, with `read` from `reader` and the `key` of this round.

        With passes, `consumed` counts the minibatches of earlier rounds, () int32, and `order` is
        the key of the orders, the same in all rounds. The client does a `share` in (0, 1], (), of
        the minibatches of `fold`, rounded up. If examples have a `protection`, its Poisson
        minibatches replace all others.
        """
        self._set(
            count=count, minibatches=minibatches, _read=read, _key=key, _generate=generate,
            _consumed=consumed, _orders=order, _options=options, _share=share,
            most_rows=most_rows, _protection=protection, _loss=None, tickets=0,
            _trace=current_trace(),
        )  # fmt: skip

    def _set(self, **values):
        for name, value in values.items():
            object.__setattr__(self, name, value)

    if not TYPE_CHECKING:

        def __setattr__(self, name, value):
            raise AttributeError(f"a client's data cannot be changed, got {name} = {value!r}")

        def __getattr__(self, name):
            raise AttributeError(
                f"a client's data have no {name!r}: step(carry, batch) of data.fold or "
                "data.full_pass reads batch.fields"
            )

    @property
    def generates(self) -> bool:
        """Return whether minibatches are generated, so that no exact pass over examples exists."""
        return self._generate is not None

    @property
    def takes_equal_steps(self) -> bool:
        """Return whether every client takes `minibatches.steps` steps, by settings alone."""
        fixed = self.minibatches.steps is not None and self.minibatches.passes is None
        return fixed and self._share is None

    def batch_shapes(self, size: int = 1) -> Batch:
        """Return the shapes of a batch of `size` rows without keys, for `jax.eval_shape`."""
        fields: Any = jax.eval_shape(self._read, jax.ShapeDtypeStruct((size,), jnp.int32))
        weight: Any = jax.ShapeDtypeStruct((size,), jnp.zeros(()).dtype)
        return Batch(fields, weight)

    def _drawn(self, index: jax.Array) -> Batch:
        """Draw a batch from the rows with replacement, or generate one."""
        size = self.minibatches.size
        if self._generate is not None:
            row, key = self._read(jnp.int32(0)), keys.stream(self._key, Stream.GENERATED, index)
            # Without the barrier XLA recomputes the batch in every consumer.
            fields = jax.lax.optimization_barrier(self._generate(key, row, size))
            return Batch(fields, jnp.ones(size), self._keys(index))
        words = keys.words(self._key, Stream.DRAWN, index * size + jnp.arange(size))
        position = threefry.integers(*words, self.count)
        return Batch(self._read(position), jnp.ones(size), self._keys(index))

    def _keys(self, index: jax.Array) -> jax.Array:
        """Return the keys of the examples of a minibatch of the round, (b,)."""
        size = self.minibatches.size
        return keys.stream(self._key, Stream.EXAMPLES, index * size + jnp.arange(size))

    def _sampled(self, index: jax.Array) -> Any:
        """Draw a minibatch by its number alone: a second fold of a round reads the same ones."""
        key, size = keys.stream(self._key, Stream.PROTECTED, index), self.minibatches.size
        return self._protection.sample(key, size, self.count, self.most_rows)

    def _readable(self, sampled: Any) -> Any:
        """Return a minibatch and what reads its rows at its gradients.

        They are read before where that would be in a branch or a loop without reverse mode.
        """
        before = self._share is not None or self._options.most_rows is not None
        return sampled, self._protection.read(sampled, self._read) if before else self._read

    def _in_order(self, order: Order, batch: jax.Array, size: int) -> Batch:
        """Return a batch of one pass over the rows."""
        position = batch * size + jnp.arange(size)
        inside = position < self.count
        return Batch(self._read(order(jnp.where(inside, position, 0))), inside.astype(float))

    def _batches(self) -> jax.Array:
        """Return the number of batches in one pass, () int32."""
        return -(-self.count // self.minibatches.size)

    def fold(
        self, step: Callable[[Carry, Batch], Carry], carry: Carry, epochs: int | None = None
    ) -> Carry:
        """Fold `step` over this round's local minibatches.

        With steps the loop has a static length. With epochs its length depends on the client, and
        reverse mode needs `most_rows`. The mean over the minibatches of the losses at their first
        `Task.gradient` becomes the client's metric "loss", from the last fold of a round.

        Args:
          step: `(carry, batch) -> carry`.
          carry: any pytree.
          epochs: number of epochs in place of the minibatches' own. Protected examples take whole
            multiples, which repeat the minibatches.

        Raises:
          ValueError: if there are steps, not epochs, or `epochs` is no such number.
          ExampleLeakError: if examples are protected, elsewhere than directly in the client.
        """
        here, noted = current_trace() == self._trace, []
        if self._protection is not None and not here:
            raise ExampleLeakError(
                "protected examples are folded over directly in the client, where gradients are "
                "counted: not inside jit, checkpoint, vmap, grad, a loop or another fold"
            )

        def took(tickets):  # at once, whatever becomes of the step
            self._set(tickets=max(self.tickets, tickets))

        def counted(carry, batch):
            carry, total = carry
            if self._protection is not None:
                sampled, rows = batch
                batch = ProtectedBatch(self._protection, sampled, rows, first, took)
            with noted_losses() as losses:
                carry = step(carry, batch)
            loss = next(iter(losses), None) if self._protection is None else batch._loss()
            if loss is None:
                return carry, total
            noted.append(True)
            return carry, total + loss.astype(total.dtype)

        view, times = self._with_epochs(epochs)
        both = carry, jnp.zeros(())
        for _ in range(times):
            first = self.tickets
            both = view._fold(counted, both)
        carry, total = both
        if noted and here:
            self._set(_loss=total / jnp.maximum(times * view.num_steps(), 1).astype(total.dtype))
        return carry

    def _with_epochs(self, epochs: int | None) -> "tuple[ClientData, int]":
        """Return the view with another number of epochs, and how often it is folded over."""
        if epochs is None:
            return self, 1
        checks.count(epochs=epochs)
        run_epochs = self.minibatches.epochs
        if run_epochs is None:
            raise ValueError(f"epochs={epochs} of a fold need Minibatches(epochs=…), got steps")
        if self._protection is not None:
            if epochs % run_epochs:
                raise ValueError(
                    f"epochs of protected examples must be multiples of {run_epochs}, got {epochs}"
                )
            return self, epochs // run_epochs
        return view_here(self, minibatches=dataclasses.replace(self.minibatches, epochs=epochs)), 1

    def _fold(self, step: Callable[[Any, Batch], Any], carry: Any) -> Any:
        def sampled(index):
            return self._readable(self._sampled(index))

        batch_at = self._drawn if self._protection is None else sampled
        steps, size = self.minibatches.steps, self.minibatches.size

        def consumed(index):
            assert self._orders is not None
            number = self._consumed + index
            key = keys.stream(self._orders, Stream.PASS, number // self._batches())
            order = random_order(key, self.count, self.most_rows)
            batch = self._in_order(order, number % self._batches(), size)
            return batch._replace(keys=self._keys(index))

        if self.minibatches.epochs is not None:
            if self._protection is None:
                return self._fold_epochs(self._halved(step), carry)
            batches = self._most_batches(size)
            most = None if batches is None else self.minibatches.epochs * batches
            return _repeat(step, sampled, carry, self.num_steps(), most)
        if self.minibatches.passes is not None or self._share is not None:
            batch = batch_at if self.minibatches.passes is None else consumed
            return _repeat(step, batch, carry, self.num_steps(), steps)
        # An accelerator starts a few kernels for the loop, and copies what it carries.
        unroll = steps if backend.platform() != "cpu" and steps <= _UNROLLED else 1
        inputs = jnp.arange(steps)
        if self._protection is not None and steps * max(self.most_rows, size) <= _DRAWN_AT_ONCE:
            inputs, batch_at = jax.vmap(self._sampled)(inputs), self._readable
        return jax.lax.scan(
            lambda c, i: (step(c, batch_at(i)), None), carry, inputs, unroll=unroll
        )[0]

    def _fold_epochs(self, step: Callable[[Any, Batch], Any], carry: Any) -> Any:
        """Fold over epochs, each in an order that is drawn once."""
        size, epochs, batches = self.minibatches.size, self.minibatches.epochs, self._batches()
        assert epochs is not None
        steps, most = self.num_steps(), self._most_batches(size)

        def epoch(number, carry):
            key = keys.stream(self._key, Stream.PASS, number)
            order = random_order(key, self.count, self.most_rows)
            taken = steps if epochs == 1 else jnp.clip(steps - number * batches, 0, batches)

            def batch(index):
                drawn = self._in_order(order, index, size)
                return drawn._replace(keys=self._keys(number * batches + index))

            return _repeat(step, batch, carry, taken, most)

        return epoch(0, carry) if epochs == 1 else jax.lax.fori_loop(0, epochs, epoch, carry)

    def num_steps(self) -> jax.Array:
        """Return the number of minibatches of `fold`, () int32; 0 once all data are consumed."""
        steps: Any = self.minibatches.steps
        if self.minibatches.passes is not None:
            left = self.minibatches.passes * self._batches() - self._consumed
            steps = jnp.clip(left, 0, steps)
        if self.minibatches.epochs is not None:
            steps = self.minibatches.epochs * self._batches()
        steps = jnp.asarray(steps, jnp.int32)
        return steps if self._share is None else jnp.ceil(self._share * steps).astype(jnp.int32)

    def full_pass(self, step: Callable[[Carry, Batch], Carry], carry: Carry) -> Carry:
        """Fold `step` over all of the client's rows once, in order.

        Batches have 16 places, or `most_rows` if that is less, whoever has how many. The number of
        batches depends on the client, and reverse mode needs `most_rows`.

        Raises:
          ExampleLeakError: if examples are protected.
        """
        if self._protection is not None:
            raise ExampleLeakError(
                "a pass over all of a client's rows (full_pass) has no noise: examples cannot be "
                "private; take task.gradient of the minibatches of data.fold"
            )
        size = min(PASS_SIZE, self.most_rows or PASS_SIZE)
        of_rows = functools.partial(self._in_order, lambda position: position, size=size)
        most = self._most_batches(size)
        return _repeat(self._halved(step), of_rows, carry, -(-self.count // size), most)

    def _halved(self, step: Callable[[Carry, Batch], Carry]) -> Callable[[Carry, Batch], Carry]:
        """Return the step with the empty half of a batch cut off, if `cuts_halves`."""

        def either(carry, batch):
            half = -(-batch.weight.shape[0] // 2)
            if half == batch.weight.shape[0]:
                return step(carry, batch)
            first = jax.tree.map(lambda leaf: leaf[:half], batch)
            return jax.lax.cond(
                batch.weight[half] > 0,  # real examples come first
                lambda carry: step(carry, batch),
                lambda carry: step(carry, first),
                carry,
            )

        return either if self._options.cuts_halves else step

    def _most_batches(self, size: int) -> int | None:
        """Return a static bound on the batches of one pass, if there is one."""
        most = self._options.most_rows
        return None if most is None else -(-most // size)


def loss_of(data: ClientData) -> dict[str, jax.Array]:
    """Return the mean "loss" of the last fold; nothing before one that takes gradients.

    For the engine: it has no noise, so a view does not give it to its client.
    """
    return {} if data._loss is None else {"loss": data._loss}


class ViewParts(NamedTuple):
    """The arrays of a client's view; its reader's arrays come first."""

    read: RowReader
    key: jax.Array
    consumed: jax.Array | None
    order: jax.Array | None
    share: jax.Array | None


def parts_of_view(data: ClientData) -> tuple[ViewParts, tuple[Any, ...]]:
    """Return the arrays of a view of a round, and its settings; for the engine."""
    settings = data.minibatches, data._generate, data._options, data.most_rows
    return ViewParts(data._read, data._key, data._consumed, data._orders, data._share), settings


def view_of_parts(parts: ViewParts, settings: tuple[Any, ...]) -> ClientData:
    """Return the view of some parts, in the current trace."""
    minibatches, generate, options, most_rows = settings
    read, key, consumed, order, share = parts
    return ClientData(
        read, read.length, key, minibatches, consumed, order, generate, options, share, most_rows
    )


def view_here(
    data: ClientData, protection: Protection = None, minibatches: Minibatches | None = None
) -> ClientData:
    """Return a client's view made in the current trace; its gradients may protect examples."""
    if data._protection is not None:
        raise ExampleLeakError("a view that protects examples has no other view: use it directly")
    minibatches = data.minibatches if minibatches is None else minibatches
    return ClientData(
        data._read, data.count, data._key, minibatches, data._consumed, data._orders,
        data._generate, data._options, data._share, data.most_rows, protection,
    )  # fmt: skip


def _repeat(
    step: Callable[[Carry, Batch], Carry],
    batch: Callable[[jax.Array], Batch],
    carry: Carry,
    count: jax.Array,
    most: int | None,
) -> Carry:
    """Fold `step` over batches 0 … count−1; the static bound `most` makes reverse mode possible.

    Batches are gathered outside the branch: `jax.vmap` over clients repeats everything a branch
    reads, which must not be all clients' rows.
    """
    if most is None:
        last = jax.lax.fori_loop(0, count, lambda index, carry: step(carry, batch(index)), carry)
        return forward_only(last, NO_REVERSE)

    def maybe(carry, index):
        return jax.lax.cond(index < count, step, lambda carry, _: carry, carry, batch(index)), None

    return jax.lax.scan(maybe, carry, jnp.arange(most))[0]
