"""A transformer of 34 million parameters whose clients train adapters alone."""

import jax
from flax import nnx

from fedjaxsim.models import Model, from_nnx, trainable


class Block(nnx.Module):
    """Causal attention, then a perceptron, each on normalized inputs and added."""

    def __init__(self, width: int, heads: int, rank: int, *, rngs: nnx.Rngs):
        def dense(inputs: int, outputs: int) -> nnx.Module:
            return nnx.LoRALinear(inputs, outputs, lora_rank=rank, rngs=rngs)

        self.heads = heads
        self.before, self.between = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.queries, self.values = dense(width, width), dense(width, width)
        self.keys, self.mixed, self.inner, self.outer = (
            nnx.Linear(inputs, outputs, rngs=rngs)
            for inputs, outputs in (
                (width, width), (width, width), (width, 4 * width), (4 * width, width)
            )
        )  # fmt: skip

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute (b, L, width) from the same."""
        z = self.before(x)
        parts = (layer(z) for layer in (self.queries, self.keys, self.values))
        split = (part.reshape(*part.shape[:2], self.heads, -1) for part in parts)
        attended = jax.nn.dot_product_attention(*split, is_causal=True)
        x = x + self.mixed(attended.reshape(x.shape))
        return x + self.outer(nnx.gelu(self.inner(self.between(x))))


class Transformer(nnx.Module):
    """Alike blocks, one after the other in a loop; logits of the next token at each place."""

    def __init__(
        self, length: int, tokens: int, width: int, layers: int, rank: int, rngs: nnx.Rngs
    ):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def blocks(rngs):
            return Block(width, width // 64 or 1, rank, rngs=rngs)

        self.tokens = nnx.Embed(tokens, width, rngs=rngs)
        self.places = nnx.Param(0.02 * rngs.params.normal((length, width)))
        self.blocks = blocks(rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.last = nnx.Linear(width, tokens, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute logits (b, L, tokens) of integers (b, L)."""

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def of_block(h, block):
            return block(h)

        h = of_block(self.tokens(x) + self.places[...], self.blocks)
        return self.last(self.norm(h))


def adapters(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    width: int = 512,
    layers: int = 8,
    rank: int = 8,
) -> Model:
    """Make the model, whose frozen weights are random: load yours into the module of `make`.

    Adapters of rank r stand beside the queries and values of each block, as in Hu et al. (2022).
    """

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return Transformer(input_shape[0], num_outputs, width, layers, rank, rngs)

    return trainable(from_nnx(make), lambda name: "lora" in name)
