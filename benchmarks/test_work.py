"""FLOPs and bytes, against counts made by hand."""

import math

import jax
import jax.numpy as jnp
import pytest
from work import flops_of, flops_of_gradient, work_of

from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings import run_config


def experiment(**settings):
    given = {"data": "random", "clients": 10, "rows": (20,), "clip": 1.0, "noise_multiplier": 1.0}
    return prepare(run_config(**(given | settings)))


def per_example(**settings):
    simulation = experiment(**settings).simulation
    return flops_of_gradient(simulation) / simulation.minibatches.size


def count(function, *arguments):
    return flops_of(jax.make_jaxpr(function)(*arguments).jaxpr)


def test_a_linear_layer_computes_outputs_and_the_gradient_of_its_weights():
    # x (1, 3) times W (3, 2): 6 multiplications and 6 additions; xᵀ times the error the same.
    assert per_example(shape=(3,), labels=2) == 12 + 12


def test_layers_after_the_first_also_compute_the_gradient_of_their_inputs():
    # 3·4 and 4·2 products: forward 24 + 16, weights 24 + 16, and 16 for the hidden layer.
    found = per_example(shape=(3,), labels=2, model="mlp", hidden=(4,))
    assert found == 24 + 16 + 24 + 16 + 16


@pytest.mark.thorough
def test_gates_and_outputs_of_a_gru_count_for_every_token():
    # 2 embedded numbers and 2 units into 6 gates, then 2 and 3 units into 9; 3 units into 5.
    found = per_example(shape=(7,), labels=5, tokens=5, model="gru", hidden=(2, 3))
    assert found == 3 * 2 * 7 * ((2 + 2) * 6 + (2 + 3) * 9 + 3 * 5)


@pytest.mark.thorough
def test_attention_counts_all_pairs_of_tokens():
    # 4 tokens make 16 pairs, each with a score and a share of 8 numbers.
    dense = 8 * 24 + 8 * 8 + 8 * 32 + 32 * 8
    found = per_example(shape=(4,), labels=5, tokens=5, model="transformer", hidden=(8,))
    assert found == 3 * 2 * (4 * dense + 16 * 2 * 8 + 4 * 8 * 5)


def test_generated_examples_are_not_counted():
    settings = {"data": "synthetic-stream", "loss": "squared", "algorithm": "ppsgd"}
    made = prepare(run_config(**settings, clients=10, sampling="full"))
    work = work_of(made, made.simulation.init(0, made.hparams))
    # 4bd a client, and of its data θ_i* alone: read with 2 × 100 floats of its own and of all.
    assert work == (10, 10 * 4 * 10 * 100, 4 * (10 * 100 + 10 * 2 * 100 + 2 * 100))


def test_a_convolution_counts_no_padding():
    x, kernel = jnp.ones((1, 1, 4)), jnp.ones((1, 1, 3))

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME")

    # Of 4 × 3 products two meet the padding.
    assert count(convolve, x, kernel) == 2 * (4 * 3 - 2)


def test_the_body_of_a_scan_counts_as_often_as_it_runs():
    a = jnp.ones((2, 2))

    def scanned(a):
        return jax.lax.scan(lambda c, _: (c @ a, None), a, length=5)[0]

    assert count(scanned, a) == 5 * 2 * 2**3
    assert count(lambda a: jax.lax.scan(lambda c, _: (scanned(c), None), a, length=3)[0], a) == 240


def test_a_loop_of_unknown_length_cannot_be_counted():
    a = jnp.ones((2, 2))

    def until(step):
        return lambda a: jax.lax.while_loop(lambda c: jnp.sum(c) < 9, step, a)

    assert math.isnan(count(until(lambda c: c @ a), a))
    assert count(until(lambda c: c + a), a) == 0


def test_the_larger_branch_counts():
    a = jnp.ones((2, 2))
    assert count(lambda a: jax.lax.cond(a[0, 0] > 0, lambda: a @ a @ a, lambda: a), a) == 32


def test_elementwise_work_is_no_product():
    assert count(lambda a: jnp.exp(a) * a + 1, jnp.ones(5)) == 0


@pytest.mark.parametrize(
    ("algorithm", "floats"),
    # d = 3 and c = 2 make 8 parameters; 5 of 10 clients read an epoch of 16 examples of 3 floats
    # and a label.
    [("fedavg", 5 * 16 * 4 + 16), ("pmtl", 5 * 16 + 5 * 16 * 4 + 16)],
)
def test_only_personal_algorithms_move_parameters_of_every_client(algorithm, floats):
    made = experiment(
        shape=(3,), labels=2, algorithm=algorithm, sampling="fixed", cohort=5, batch_size=16
    )
    work = work_of(made, made.simulation.init(0, made.hparams))
    assert work == (5, 5 * 16 * 24, 4 * floats)


def test_local_passes_and_steps_multiply_the_gradients():
    given = {"shape": (3,), "labels": 2, "sampling": "full", "local_steps": 3}
    flops = [
        work_of(made, made.simulation.init(0, made.hparams)).flops
        for made in (experiment(algorithm=name, **given) for name in ("pmtl", "ditto"))
    ]
    assert flops == [10 * 3 * 10 * 24, 2 * 10 * 3 * 10 * 24]
