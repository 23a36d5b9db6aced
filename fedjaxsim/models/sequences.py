"""Models of sequences of tokens, such as the characters of a text: a GRU and a transformer.

Both are causal: the output at a position depends only on the tokens up to it.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from fedjaxsim.kernels import backend
from fedjaxsim.models.model import Model, sizes, wide
from fedjaxsim.models.modules import from_flax

_FEW_TOKENS = 1024
"""Largest vocabulary whose embedding an accelerator differentiates by a product."""

_UNROLLED = {"gpu": 4, "tpu": 8}
"""Positions in an iteration. A GPU waits for launches, but eight positions would move a fifth more
bytes. A TPU has eight in a tile, from which it takes a single one slowly."""


def _with_wide_bias(inputs, kernel, bias, *, dtype=None):
    inputs, kernel, bias = promote_dtype(inputs, kernel, bias, dtype=dtype)
    return inputs, kernel, wide(bias)


class _Dense(nn.Dense):
    """A layer that adds its bias in at least float32, as `plus_bias` does."""

    promote_dtype: Any = _with_wide_bias

    @nn.compact
    def __call__(self, inputs):
        return super().__call__(inputs).astype(inputs.dtype)


class _GRU(nn.Module):
    """A layer of gated recurrent units, equal to `flax.linen.GRUCell`.

    One product with inputs serves all positions and gates; only products with the state are
    sequential.
    """

    width: int

    @nn.compact
    def __call__(self, x):
        inputs = _Dense(3 * self.width, name="inputs")(x)
        kernel = self.param("recurrent", _orthogonal_blocks, (self.width, 3 * self.width))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.width,))
        states = _states if backend.platform() == "cpu" else _states_of_accelerators
        return states(inputs.swapaxes(0, 1), kernel, bias).swapaxes(0, 1)


def _states(inputs, kernel, bias):
    """Return the states (L, b, h) of units whose gates have the inputs (L, b, 3h)."""

    def step(state, gate_inputs):
        _, keep, candidate, _ = _gates(gate_inputs, state @ kernel, bias)
        state = (1 - keep) * candidate + keep * state
        return state, state

    return _scan(step, inputs, jnp.zeros((inputs.shape[1], len(kernel)), inputs.dtype))


def _gates(inputs, recurrent, bias):
    """Return the reset and keep gates, the candidate, and what the reset gate multiplies in it."""
    width = len(bias)
    gates = jax.nn.sigmoid(inputs[..., : 2 * width] + recurrent[..., : 2 * width])
    reset, keep = gates[..., :width], gates[..., width:]
    past = recurrent[..., 2 * width :] + bias
    return reset, keep, jnp.tanh(inputs[..., 2 * width :] + reset * past), past


def _scan(step, inputs, start):
    return jax.lax.scan(step, start, inputs, unroll=_UNROLLED.get(backend.platform(), 1))[1]


_states_of_accelerators = jax.custom_jvp(_states)


@_states_of_accelerators.defjvp
def _states_jvp(primals, tangents):
    """Differentiate the gates of all positions at once; only the state's tangent is sequential.

    In reverse the kernel's derivative is one product, instead of a sum of one for each position.
    A CPU is faster if it keeps the gates of each position than if it computes them again.
    """
    inputs, kernel, bias = primals
    states = _states_of_accelerators(*primals)
    before = jnp.concatenate([jnp.zeros_like(states[:1]), states[:-1]])
    reset, keep, candidate, past = _gates(inputs, before @ kernel, bias)
    by_candidate = (1 - keep) * (1 - candidate**2)
    by_past = by_candidate * reset
    by_reset = by_past * past * (1 - reset)
    by_keep = (before - candidate) * keep * (1 - keep)

    def step(state, at_position):
        keep, by_reset, by_keep, by_past, change = at_position
        to_reset, to_keep, to_past = jnp.split(state @ kernel, 3, axis=-1)
        state = keep * state + by_reset * to_reset + by_keep * to_keep + by_past * to_past + change
        return state, state

    of_reset, of_keep, of_candidate = jnp.split(tangents[0], 3, axis=-1)
    to_reset, to_keep, to_past = jnp.split(before @ tangents[1], 3, axis=-1)
    change = by_reset * (of_reset + to_reset) + by_keep * (of_keep + to_keep)
    change += by_candidate * of_candidate + by_past * to_past
    change = (change + by_past * wide(tangents[2])).astype(states.dtype)
    at_positions = (keep, by_reset, by_keep, by_past, change)
    return states, _scan(step, at_positions, jnp.zeros_like(states[0]))


def _orthogonal_blocks(key, shape, dtype=jnp.float32):
    """Initialize a kernel (h, 3h) with an orthogonal matrix for each gate."""
    block = nn.initializers.orthogonal()
    keys = jax.random.split(key, shape[1] // shape[0])
    return jnp.concatenate([block(k, (shape[0], shape[0]), dtype) for k in keys], axis=1)


class _Block(nn.Module):
    """Causal attention, then a perceptron, each on normalized inputs and added."""

    heads: int

    @nn.compact
    def __call__(self, x):
        b, length, width = x.shape
        parts = _Dense(3 * width, name="attention")(nn.LayerNorm()(x))
        parts = parts.reshape((b, length, 3, self.heads, width // self.heads))
        # The softmax is in float32, whatever the type of the products is.
        mixed = jax.nn.dot_product_attention(*jnp.moveaxis(parts, 2, 0), is_causal=True)
        x = x + _Dense(width, name="mixed")(mixed.reshape(x.shape))
        h = nn.gelu(_Dense(4 * width, name="inner")(nn.LayerNorm()(x)))
        return x + _Dense(width, name="outer")(h)


class _Embedding(nn.Embed):
    """A table of vectors, with a derivative that repeats bit for bit.

    A GPU adds up the derivative of a lookup in changing order, but of a product always in one.
    """

    def __call__(self, inputs):
        if backend.platform() == "cpu" or self.num_embeddings > _FEW_TOKENS:
            return super().__call__(inputs)
        return _rows(self.embedding, inputs)


@jax.custom_jvp
def _rows(table, tokens):
    return jnp.take(table, tokens, axis=0)


@_rows.defjvp
def _rows_jvp(primals, tangents):
    table, tokens = primals
    chosen = jax.nn.one_hot(tokens, len(table), dtype=table.dtype)
    highest = jax.lax.Precision.HIGHEST
    return _rows(table, tokens), jnp.einsum("...v,vh->...h", chosen, tangents[0], precision=highest)


class _OfTokens(nn.Module):
    """Embedding, layers, and logits at every position or at the last."""

    length: int
    hidden: tuple[int, ...]
    num_outputs: int
    num_tokens: int
    heads: int | None
    last: bool
    padding: int | None

    @nn.compact
    def __call__(self, tokens):
        x = _Embedding(self.num_tokens, self.hidden[0], name="embedding")(tokens.astype(jnp.int32))
        if self.heads is None:
            for width in self.hidden:
                x = _GRU(width)(x)
        else:
            place = nn.initializers.normal(0.02)
            places = self.param("places", place, (self.length, self.hidden[0]))
            x = x + places[: tokens.shape[1]]
            for _ in self.hidden:
                x = _Block(self.heads)(x)
            x = nn.LayerNorm()(x)
        if self.last:
            x = self._last(x, tokens)
        return _Dense(self.num_outputs, name="output")(x)

    def _last(self, x, tokens):
        """Take the last token of each row, (b, d), or the first of a row of padding."""
        if self.padding is None:
            return x[:, -1]
        count = jnp.sum(tokens != self.padding, axis=1)
        return jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]


def gru(
    input_shape: Sequence[int],
    num_outputs: int,
    num_tokens: int,
    hidden: Sequence[int] = (64,),
    *,
    last: bool = False,
    padding: int | None = None,
) -> Model:
    """Make gated recurrent units (Cho et al. 2014) over embedded tokens.

    Args:
      input_shape: (L,), integers in [0, num_tokens).
      num_outputs: c.
      num_tokens: number of different tokens; the embedding is as wide as the first layer.
      hidden: the units of each layer.
      last: whether outputs are (b, c), at the last token of each row; else (b, L, c).
      padding: the token that pads shorter rows, if there is one; only read with `last`.
    """
    hidden = sizes(hidden=hidden)
    return _of_tokens("gru", input_shape, hidden, num_outputs, num_tokens, None, last, padding)


def transformer(
    input_shape: Sequence[int],
    num_outputs: int,
    num_tokens: int,
    hidden: Sequence[int] = (64,),
    *,
    heads: int = 4,
    last: bool = False,
    padding: int | None = None,
) -> Model:
    """Make a decoder (Vaswani et al. 2017) with pre-normalization and learnt positions.

    Args:
      input_shape: (L,), integers in [0, num_tokens).
      num_outputs: c.
      num_tokens: number of different tokens.
      hidden: the width of each block, all equal; the perceptrons within are four times as wide.
      heads: number of attention heads; divides the width.
      last: see `gru`.
      padding: see `gru`.
    """
    hidden = sizes(hidden=hidden)
    if len(set(hidden)) != 1 or hidden[0] % heads:
        raise ValueError(
            f"a transformer's blocks must have one width, a multiple of its {heads} heads, got "
            f"hidden {', '.join(map(str, hidden))}"
        )
    more = (hidden, num_outputs, num_tokens, heads, last, padding)
    return _of_tokens("transformer", input_shape, *more)


def _of_tokens(name: str, input_shape: Sequence[int], *more: Any) -> Model:
    """Make the model of `_OfTokens(length, *more)`."""
    input_shape = sizes(input_shape=input_shape)
    if len(input_shape) != 1:
        raise ValueError(
            f"{name} needs rows of tokens, x of shape (n, L), got examples of shape "
            f"{tuple(input_shape)}"
        )
    return from_flax(_OfTokens(*input_shape, *more), input_shape, "output", dtype=jnp.int32)
