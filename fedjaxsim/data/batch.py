"""A minibatch, and the Poisson minibatches whose gradients protect single examples."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim.kernels import threefry


class Protection(NamedTuple):
    """The noise with which gradients of one minibatch protect its examples.

    Attributes:
      key: of the noise, secret.
      clip_norm: C, () the bound on the norm of an example's gradient.
      noise_multiplier: z, () the noise on the sum of bounded gradients over C.
      expected: () the expected number of examples, by which the noised sum is divided.
    """

    key: jax.Array
    clip_norm: jax.Array
    noise_multiplier: jax.Array
    expected: jax.Array


class Batch(NamedTuple):
    """A minibatch with static shapes.

    Attributes:
      fields: each (b, ...), by name: "x" and "y" by convention.
      weight: (b,) float, 1 for an example and 0 for padding (the last batch may be partial).
      protection: noise for its gradients, if the task protects examples; else None.
    """

    fields: dict[str, jax.Array]
    weight: jax.Array
    protection: Protection | None = None

    def sum(self, values: jax.Array) -> jax.Array:
        """Sum per-example `values` (b,) over the real examples, ()."""
        weight = self.weight.astype(values.dtype)
        return jnp.sum(jnp.where(weight > 0, weight * values, 0))

    def mean(self, values: jax.Array) -> jax.Array:
        """Average per-example `values` (b,) over the real examples, () (0 if none)."""
        return self.sum(values) / jnp.maximum(jnp.sum(self.weight), 1.0).astype(values.dtype)


class ProtectedBatches(NamedTuple):
    """Poisson minibatches of a client whose gradients protect examples.

    Attributes:
      capacity: static; places of a minibatch. A larger one loses its last examples.
      clip_norm: C, ().
      noise_multiplier: z of this client, ().
      checked: the one minibatch of a check that follows its rows; None in a run.
    """

    capacity: int
    clip_norm: jax.Array
    noise_multiplier: jax.Array
    checked: Batch | None = None

    def sample(
        self,
        key: jax.Array,
        size: int,
        count: jax.Array,
        most_rows: int,
        read: Callable[[jax.Array], dict[str, jax.Array]],
    ) -> Batch:
        """Draw each of n rows with probability min(1, b/n), with coins of the key and the row.

        Args:
          key: of this minibatch.
          size: b.
          count: n, () int32.
          most_rows: a static bound on n.
          read: the reader of the client's rows.
        """
        if self.checked is not None:
            return self.checked
        coin_key, noise_key = threefry.split(key)
        rate = poisson_rate(size, count)
        # At rate 1 the threshold does not fit into 32 bits, and every row is drawn.
        threshold = jnp.floor(jnp.where(rate < 1, rate, 0) * jnp.float32(2.0**32))
        heads = threefry.bits(coin_key, (most_rows,)) < threshold.astype(jnp.uint32)
        drawn = (jnp.arange(most_rows) < count) & (heads | (rate >= 1))
        chosen = jnp.nonzero(drawn, size=self.capacity, fill_value=most_rows)[0].astype(jnp.int32)
        noise = Protection(noise_key, self.clip_norm, self.noise_multiplier, rate * count)
        return Batch(read(chosen), (chosen < most_rows).astype(float), noise)


def poisson_rate(size: int, count: jax.Array) -> jax.Array:
    """Return the rate min(1, b/n) of a Poisson minibatch of n rows, () float32."""
    return jnp.minimum(1.0, jnp.float32(size) / jnp.maximum(count, 1).astype(jnp.float32))
