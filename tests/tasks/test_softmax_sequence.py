"""A loss per token: padding counts for nothing, and every real token for as much as another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import fedjaxsim as fjs
from fedjaxsim.data.minibatches import Batch
from fedjaxsim.gradients.whole_run import mean_metric
from fedjaxsim.tasks import softmax_sequence
from fedjaxsim.tasks.task import check_rows

CLASSES = 4
LABELS = np.array([[1, 3, -1], [2, -1, -1], [0, 0, 1]], np.int32)


def logits_are_parameters():
    """A model whose outputs are its parameters, (b, L, c), whatever x is."""
    return fjs.Model(lambda key: jnp.zeros((3, 3, CLASSES)), lambda params, x: params)


def embedding(tokens):
    """A user's own model of sequences: a table of logits for each token of x (b, L)."""
    return fjs.Model(
        lambda key: jnp.zeros((tokens, CLASSES)), lambda table, x: table[x.astype(jnp.int32)]
    )


def batch(weight):
    fields = {"x": jnp.zeros((3, 3), jnp.int32), "y": jnp.asarray(LABELS)}
    return Batch(fields, jnp.asarray(weight, jnp.float32))


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(size=(3, 3, CLASSES)).astype(np.float32)


@pytest.mark.parametrize("weight", [[1, 1, 1], [1, 1, 0]])
def test_the_loss_is_the_mean_over_real_tokens(logits, weight):
    task = softmax_sequence(logits_are_parameters(), CLASSES)
    likelihood = scipy.special.log_softmax(logits.astype(np.float64), axis=-1)
    losses = [
        -likelihood[k, t, LABELS[k, t]] for k, t in zip(*np.nonzero(LABELS >= 0), strict=True)
        if weight[k]
    ]  # fmt: skip
    loss, slope = jax.jit(jax.value_and_grad(task.loss))(jnp.asarray(logits), batch(weight))
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)
    real = (LABELS >= 0) & (np.array(weight) > 0)[:, None]
    assert np.all(np.any(slope != 0, axis=-1) == real)


def test_metrics_are_sums_over_tokens_and_targets_their_number(logits):
    task = softmax_sequence(logits_are_parameters(), CLASSES)
    loss, found = jax.jit(lambda w, b: (task.loss(w, b), task.metrics(w, b)))(
        jnp.asarray(logits), batch([1, 1, 1])
    )
    right = (logits.argmax(axis=-1) == LABELS).sum(axis=1)
    np.testing.assert_array_equal(found["accuracy"], right)
    assert task.targets is not None
    np.testing.assert_array_equal(jax.jit(task.targets)({"y": jnp.asarray(LABELS)}), [2, 1, 3])
    np.testing.assert_allclose(loss, np.sum(found["loss"]) / 6, rtol=1e-6)


def test_a_minibatch_without_tokens_has_no_loss():
    task = softmax_sequence(logits_are_parameters(), CLASSES)
    assert task.loss(jnp.ones((3, 3, CLASSES)), batch([0, 0, 0])) == 0


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([0, 1]), r"labels .*int64 \(2,\)"),
        (np.zeros((2, 2)), "labels .*float64"),
        (np.array([[0, 4]]), "labels from 0 to 4"),
        (np.array([[0, -2]]), "labels from -2 to 0"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels, message):
    task = softmax_sequence(logits_are_parameters(), CLASSES)
    with pytest.raises(ValueError, match=message):
        check_rows(task, {"x": labels, "y": labels})


@pytest.fixture(scope="module")
def simulation():
    """Two clients with sequences of unlike lengths; the next token is the token and one."""
    x = np.array([[0, 1, 2], [1, 2, 3], [3, 0, 4], [2, 4, 4]], np.uint8)
    y = np.where(x == CLASSES, -1, (x.astype(np.int32) + 1) % CLASSES)
    y[0, 2] = 0  # but once
    population = fjs.Population.from_flat({"x": x, "y": y}, [2, 2])
    task = softmax_sequence(embedding(CLASSES + 1), CLASSES)
    minibatches = fjs.Minibatches(2, epochs=1)
    return fjs.Simulation(fjs.fedavg(task), population, fjs.full_participation(), minibatches)


@pytest.mark.thorough
def test_every_token_of_a_client_counts_once(simulation):
    hparams = simulation.hyperparameters(learning_rate=1.0)
    state, _ = simulation.run(simulation.init(0, hparams), hparams, rounds=6, eval_every=6)
    train = simulation.evaluate(state, hparams, "train")
    # Of client 0's six tokens all but one follow the rule, and client 1 has three.
    assert train.count.tolist() == [6, 3]
    np.testing.assert_allclose(train.values["accuracy"], [5 / 6, 1])
    table = np.asarray(state.shared.params)
    fields = simulation.population.fields
    losses = -scipy.special.log_softmax(table[fields["x"]], axis=-1)
    own = np.take_along_axis(losses, np.maximum(fields["y"], 0)[..., None], -1)[..., 0]
    real = fields["y"] >= 0
    expected = [np.mean(own[rows][real[rows]]) for rows in (slice(0, 2), slice(2, 4))]
    np.testing.assert_allclose(train.values["loss"], expected, rtol=1e-5)
    objective = mean_metric(simulation, "loss", "train")
    np.testing.assert_allclose(objective(state, hparams.as_arrays()), train.mean("loss"), rtol=1e-6)
    pooled = mean_metric(simulation, "loss", "train", pooled=True)(state, hparams.as_arrays())
    np.testing.assert_allclose(pooled, train.pooled("loss"), rtol=1e-6)


def test_a_token_without_a_prediction_leaves_the_example_without_a_value(logits):
    """NaN is no prediction; at padding nothing is predicted."""
    task, rows = softmax_sequence(logits_are_parameters(), CLASSES), batch([1, 1, 1])
    whole = task.metrics(logits, rows)["accuracy"]
    padded, real = logits.copy(), logits.copy()
    padded[0, 2], real[1, 0, 3] = np.nan, np.nan
    np.testing.assert_array_equal(task.metrics(padded, rows)["accuracy"], whole)
    lost = task.metrics(real, rows)["accuracy"]
    np.testing.assert_array_equal(np.isnan(lost), [False, True, False])
    np.testing.assert_array_equal(lost[np.array([0, 2])], whole[np.array([0, 2])])
