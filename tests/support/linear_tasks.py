"""Linear regressions related by a low rank, which tests of several algorithms use in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.algorithms.mpmtl import Acceleration, Penalty, mpmtl
from fedjaxsim.algorithms.server_maps import ServerMap
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.models.model import linear
from fedjaxsim.privacy.mechanisms.gram import gaussian_gram
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import squared

M, N, D = 8, 6, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(M, N, D)) * [3.0, 1.0, 0.5, 0.2]
TRUTH = RNG.normal(size=(D, 2)) @ RNG.normal(size=(2, M))
Y = np.einsum("mnd,dm->mn", X, TRUTH) + 0.3 * RNG.normal(size=(M, N))
POPULATION = Population.from_clients([{"x": X[i], "y": Y[i]} for i in range(M)])
TASK = squared(linear((D,), 1, bias=False))
SMOOTHNESS = max(np.linalg.eigvalsh(x.T @ x / N)[-1] for x in X)  # L, of every client's loss
ETA, LAM = 1 / SMOOTHNESS, 0.3
PLAIN = {"learning_rate": ETA, "lam": LAM}
ROUNDS = 800


def behind(algorithm, mechanism, population=POPULATION, **settings):
    """A simulation of an algorithm whose clients take one step a round."""
    one = Minibatches(1, steps=1)
    return Simulation(algorithm, population, full_participation(), one, mechanism, **settings)


@functools.cache
def path(
    penalty: Penalty = "low-rank",
    acceleration: Acceleration = "none",
    rounds: int = ROUNDS,
    server_map: ServerMap | None = None,
):
    """(values) -> what all clients predict with after each round, (T, d, m); compiled once."""
    algorithm = mpmtl(TASK, penalty=penalty, acceleration=acceleration, server_map=server_map)
    sim = behind(algorithm, gaussian_gram(penalty.endswith("group-sparse")))
    program, rows = sim.program, sim.rows["train"]

    @jax.jit
    def run(hparams):
        def step(state, _):
            state, _ = program.step(state, hparams, rows)
            return state, predict(state.shared, state.personal, hparams, jnp.arange(M))["kernel"]

        return jax.lax.scan(step, program.init(jax.random.key(0), hparams), length=rounds)[1]

    predict = jax.vmap(algorithm.predict, (None, 0, None, 0))
    return lambda values: np.moveaxis(
        np.asarray(run(sim.check(sim.hyperparameters(**values))))[..., 0, :], 1, 2
    )


def gradient(w):
    """Gradients of all clients' losses at (d, m) models, in numpy."""
    return np.einsum("mnd,mn->dm", X, np.einsum("mnd,dm->mn", X, w) - Y) / N
