"""Optimizers of clients and of the server, from optax."""

import jax.numpy as jnp
import numpy as np
import optax

from fedjaxsim.algorithms import optimizers
from fedjaxsim.hyperparameters import Hyperparameters


def test_schedules_come_from_optax():
    schedule = optax.cosine_decay_schedule(1.0, 10)
    built = optimizers.local(optax.sgd, schedule)(
        Hyperparameters(learning_rate=0.5).as_arrays(), jnp.int32(5)
    )
    update, _ = built.update(jnp.ones(1), built.init(jnp.ones(1)))
    np.testing.assert_allclose(jnp.asarray(update), [-0.25], rtol=1e-6)  # 0.5 · ½(1 + cos(π/2))
