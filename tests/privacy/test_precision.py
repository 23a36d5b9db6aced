"""Products between messages and a release are full float32: else a card takes TF32 or bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support.problems import LAWFUL, algorithm_of, classification, least_squares

import fedjaxsim as fjs
from fedjaxsim.algorithms import SYSTEMS
from fedjaxsim.factories import make
from fedjaxsim.kernels.products import unsealed
from fedjaxsim.privacy.choices import MECHANISMS
from fedjaxsim.privacy.private_examples import GradientNoise, Sampled

VALUES = {"clip": 1.0, "noise_multiplier": 1.0, "learning_rate": 0.1, "count_noise": 2.0}
HIGHEST = (jax.lax.Precision.HIGHEST,) * 2
OTHERS = ("adaptive", "correlated", "pure", "client-noise", "pure-gram", "wishart")
ROUNDS = [(name, LAWFUL[name].mechanism) for name in LAWFUL if LAWFUL[name].sends]
ROUNDS += [("mpmtl" if name in ("pure-gram", "wishart") else "fedavg", name) for name in OTHERS]
FIRST = {pair[1]: pair for pair in reversed(ROUNDS)}  # a system for each mechanism
QUICK = {FIRST[name] for name in ("gaussian", "gaussian-gram", "every-row")}


def precisions(jaxpr):
    """The precision of each product, those inside other equations too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]
        for value in jax.tree.leaves(list(equation.params.values())):
            if hasattr(value, "eqns"):
                yield from precisions(getattr(value, "jaxpr", value))


def without_clients(algorithm):
    """The algorithm with messages of zeros, and a server that only reads the release."""

    def client(shared, personal, data, hparams, context):
        def results():
            kept, message, metrics = algorithm.client(shared, personal, data, hparams, context)
            return kept, unsealed(message), metrics

        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(results))

    return algorithm._replace(client=client, server=lambda shared, *_: shared)


@pytest.mark.parametrize(
    ("system", "mechanism"),
    [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.thorough) for pair in ROUNDS],
)
def test_a_round_outside_of_clients_multiplies_in_full_precision(system, mechanism):
    problem = least_squares if SYSTEMS[system].linear else classification
    population, task = problem([5, 8, 9])
    sim = fjs.Simulation(
        algorithm_of(system, task, 3), population, fjs.full_participation(),
        fjs.Minibatches(2, steps=1), make(MECHANISMS[mechanism]),
    )  # fmt: skip
    hparams = sim.hyperparameters(
        **{
            name: VALUES.get(name, 1.0)
            for name, record in sim.records.items()
            if name in VALUES or record.default is None
        }
    )
    program = dataclasses.replace(sim.program, algorithm=without_clients(sim.program.algorithm))
    state = jax.eval_shape(program.init, jax.random.key(0), hparams.as_arrays())

    def a_round(state, hparams):
        after, _ = program.step(state, hparams, sim.rows["train"])
        return sim.epsilon(after, 1e-3)

    traced = jax.make_jaxpr(a_round)(state, hparams.as_arrays())
    assert {*precisions(traced.jaxpr)} <= {HIGHEST}


def test_sums_of_gradients_of_examples_are_products_in_full_precision():
    """One for each layer; the plain form adds without products. The noise has one, too."""
    task = fjs.tasks.softmax(fjs.models.mlp((3,), 4, (5, 6)), 4)
    params = jax.eval_shape(task.init, jax.random.key(0))
    fields = {"x": jnp.ones((8, 3)), "y": jnp.zeros(8, jnp.int32)}
    batch = fjs.Batch(fields, jnp.ones(8))
    key = jax.random.key(0)
    drawn = Sampled(jnp.arange(8), jnp.int32(8), key, jnp.float32(8), key)
    noise = GradientNoise(8, 8, jnp.float32(1), jnp.float32(1))
    for form, wanted in ((task, 4), (task._replace(layers=None), 1)):
        traced = jax.make_jaxpr(
            lambda params, form=form: noise.gradient(form, params, drawn, batch, 0)
        )(params)
        assert sum(each == HIGHEST for each in precisions(traced.jaxpr)) == wanted
