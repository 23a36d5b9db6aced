"""GRU and transformer: what libraries and formulas give, from left to right, whatever is behind."""

import json

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import fedjaxsim as fjs
from fedjaxsim.cli import main
from fedjaxsim.data.minibatches import Batch
from fedjaxsim.kernels.backend import Backend, planning_for
from fedjaxsim.models import cnn, gru, in_bfloat16, linear, mlp, sequences, transformer
from fedjaxsim.models.model import plus_bias
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.settings import run_config
from fedjaxsim.tasks import softmax, softmax_sequence

LENGTH, TOKENS, CLASSES = 5, 6, 3
PADDING = TOKENS - 1


def drawn(model, seed=0):
    """Parameters of which none is zero or one."""
    random = np.random.default_rng(seed)
    params = jax.jit(model.init)(jax.random.key(seed))
    return jax.tree.map(
        lambda leaf: np.asarray(leaf + 0.3 * random.normal(size=leaf.shape), np.float32),
        jax.device_get(params),
    )


def tokens(rows=4, seed=0):
    drawn_ = np.random.default_rng(seed).integers(0, PADDING, (rows, LENGTH))
    return jnp.asarray(drawn_, jnp.uint8)


def make(name, **settings):
    factory, hidden = {"gru": (gru, (4, 3)), "transformer": (transformer, (4, 4))}[name]
    if factory is transformer:
        settings["heads"] = 2
    return factory((LENGTH,), CLASSES, TOKENS, hidden, **settings)


@pytest.mark.thorough
def test_a_gpu_adds_no_derivative_of_an_embedding_in_changing_order():
    """A product's order is fixed; a scatter's is not."""
    model = gru((6,), 3, 5, (4,))
    params = model.init(jax.random.key(0))
    tokens = jnp.array([[0, 1, 1, 4, 1, 0]])

    def slopes(params):
        def loss(params):
            return jnp.sum(model.apply(params, tokens) ** 2)

        return jax.grad(loss)(params), jax.jvp(loss, (params,), (params,))[1]

    here = slopes(params)
    with planning_for(Backend("gpu", None)):
        there, text = slopes(params), str(jax.make_jaxpr(slopes)(params))
    assert "scatter-add" not in text
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), there, here)


@pytest.mark.parametrize("platform", ["gpu", pytest.param("tpu", marks=pytest.mark.thorough)])
def test_an_accelerator_differentiates_a_gru_as_the_plain_recurrence(platform):
    """Positions fill no whole number of a loop's iterations; each client has its own weights."""
    model = gru((11,), 3, 5, (4,))
    params = jax.tree.map(lambda *leaves: np.stack(leaves), drawn(model, 0), drawn(model, 1))
    x = jnp.asarray(np.random.default_rng(0).integers(0, 5, (2, 3, 11)))

    def loss(params):
        return jnp.sum(jax.vmap(model.apply)(params, x) ** 2)

    def derivatives(params):
        return loss(params), jax.jvp(jax.grad(loss), (params,), (params,))

    plain = jax.jit(derivatives)(params)
    with planning_for(Backend(platform, None)):
        assert sequential_products(jax.make_jaxpr(jax.grad(loss))(params).jaxpr) == 2
        found = jax.jit(derivatives)(params)
    assert sequential_products(jax.make_jaxpr(jax.grad(loss))(params).jaxpr) == 3
    chex.assert_trees_all_close(found, plain, rtol=1e-4, atol=1e-4)


def sequential_products(jaxpr, in_loop=False):
    """Count the products in the loops of a jaxpr."""
    total = 0
    for each in jaxpr.eqns:
        name = each.primitive.name
        total += in_loop and name == "dot_general"
        inside = jaxprs_in_params(each.params)
        total += sum(sequential_products(inner, in_loop or name == "scan") for inner in inside)
    return total


NETWORKS = pytest.mark.parametrize(
    "name", [pytest.param("gru", marks=pytest.mark.thorough), "transformer"]
)


def test_the_gru_is_that_of_flax():
    params, x = drawn(gru((LENGTH,), CLASSES, TOKENS, (4,))), tokens()
    ours, width = params["_GRU_0"], 4
    blocks = {
        side: np.split(ours[at]["kernel"] if at == "inputs" else ours[at], 3, axis=1)
        for side, at in (("i", "inputs"), ("h", "recurrent"))
    }
    biases = np.split(ours["inputs"]["bias"], 3)
    cell = {f"{side}{gate}": {"kernel": block}
            for side in "ih" for gate, block in zip("rzn", blocks[side], strict=True)}  # fmt: skip
    for gate, bias in zip("rzn", biases, strict=True):
        cell[f"i{gate}"]["bias"] = bias
    cell["hn"]["bias"] = ours["bias"]
    embedded = params["embedding"]["embedding"][x]
    layer = nn.RNN(nn.GRUCell(width))
    states = jax.jit(layer.apply)({"params": {"cell": cell}}, embedded)
    assert isinstance(states, jax.Array)
    expected = states @ params["output"]["kernel"] + params["output"]["bias"]
    found = jax.jit(gru((LENGTH,), CLASSES, TOKENS, (4,)).apply)(params, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_transformer_is_its_formula():
    model = transformer((LENGTH,), CLASSES, TOKENS, (4,), heads=2)
    params, x = drawn(model), tokens()

    def norm(h, w):
        h = h - h.mean(-1, keepdims=True)
        return h / np.sqrt((h**2).mean(-1, keepdims=True) + 1e-6) * w["scale"] + w["bias"]

    def dense(h, w):
        return h @ w["kernel"] + w["bias"]

    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    b = p["_Block_0"]
    h = p["embedding"]["embedding"][np.asarray(x)] + p["places"]
    parts = dense(norm(h, b["LayerNorm_0"]), b["attention"]).reshape(4, LENGTH, 3, 2, 2)
    query, key, value = np.moveaxis(parts, 2, 0)
    scores = np.einsum("bqhk,bshk->bhqs", query, key) / np.sqrt(2)
    weights = np.exp(scores) * np.tril(np.ones((LENGTH, LENGTH)))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("bhqs,bshk->bqhk", weights, value).reshape(h.shape)
    h = h + dense(mixed, b["mixed"])
    inner = np.asarray(jax.nn.gelu(jnp.asarray(dense(norm(h, b["LayerNorm_1"]), b["inner"]))))
    h = norm(h + dense(inner, b["outer"]), p["LayerNorm_0"])
    expected = dense(h, p["output"])
    np.testing.assert_allclose(jax.jit(model.apply)(params, x), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.thorough
@NETWORKS
def test_a_later_token_leaves_what_was_said_before(name):
    model = make(name)
    params, x = drawn(model), tokens()
    apply = jax.jit(model.apply)
    before, after = apply(params, x), apply(params, x.at[:, 3].set((x[:, 3] + 1) % PADDING))
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert np.all(np.any(before[:, 3:] != after[:, 3:], axis=-1))


@pytest.mark.thorough
@NETWORKS
def test_padding_leaves_the_losses_unchanged(name):
    x = tokens()
    padded = x.at[:, 3:].set(PADDING)
    weight = jnp.ones(len(x))
    # A loss per token: the labels behind the end are −1.
    model = make(name)
    params, task = drawn(model), softmax_sequence(model, CLASSES)
    y = jnp.asarray(np.random.default_rng(1).integers(0, CLASSES, x.shape))
    short = Batch({"x": x[:, :3], "y": y[:, :3]}, weight)
    long = Batch({"x": padded, "y": y.at[:, 3:].set(-1)}, weight)
    loss = jax.jit(task.loss)
    np.testing.assert_allclose(loss(params, long), loss(params, short), rtol=1e-5)
    # A loss per row, of what is said at its last token.
    model = make(name, last=True, padding=PADDING)
    loss = jax.jit(softmax(model, CLASSES).loss)
    found, expected, other = (
        loss(params, Batch({"x": rows, "y": y[:, 0]}, weight)) for rows in (padded, x[:, :3], x)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert abs(other - expected) > 1e-3


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"heads.*hidden 8, 4"):
        transformer((LENGTH,), CLASSES, TOKENS, (8, 4))
    with pytest.raises(ValueError, match=r"heads.*hidden 8"):
        transformer((LENGTH,), CLASSES, TOKENS, (8,), heads=3)
    with pytest.raises(ValueError, match=r"gru .*\(4, 5\)"):
        gru((4, 5), CLASSES, TOKENS)


# --- what is computed in bfloat16 -----------------------------------------------------------------


def types_of_products(function, *arguments):
    """The types of what is multiplied in all products of a program."""
    found = set()

    def look(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                found.update(str(value.aval.dtype) for value in equation.invars)
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                if hasattr(inner, "eqns"):
                    look(getattr(inner, "jaxpr", inner))

    look(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found


@pytest.mark.parametrize(
    ("make_model", "shape", "dtype"),
    [
        (lambda: linear((4,), 3), (4,), "float32"),
        (lambda: mlp((4,), 3, (5,)), (4,), "float32"),
        (lambda: mlp((4,), 3, (5,)), (4,), "uint8"),
        (lambda: cnn((16, 16), 3), (16, 16), "float32"),
        (lambda: make("gru"), (LENGTH,), "uint8"),
        (lambda: make("transformer"), (LENGTH,), "uint8"),
    ],
    ids=["linear", "mlp", "integers", "cnn", "gru", "transformer"],
)
def test_products_are_made_in_bfloat16_between_parameters_and_outputs_in_float32(
    make_model, shape, dtype
):
    model, x = make_model(), jnp.ones((2, *shape), dtype)
    low, params = in_bfloat16(model), jax.eval_shape(model.init, jax.random.key(0))
    assert jax.eval_shape(low.init, jax.random.key(0)) == params
    assert jax.eval_shape(low.apply, params, x).dtype == jnp.float32

    def slope(params, x):
        return jax.grad(lambda params: low.apply(params, x).sum())(params)

    found = jax.eval_shape(slope, params, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}
    assert types_of_products(low.apply, params, x) == {"bfloat16"}
    assert types_of_products(model.apply, params, x) == {"float32"}


def test_derivatives_of_biases_in_bfloat16_are_summed_in_float32():
    # A number, with derivative 1, from each of 40·9 places: in bfloat16 256 + 1 is 256.
    x, bias = jnp.zeros((40, 9, 2), jnp.bfloat16), jnp.zeros(2, jnp.bfloat16)
    layer, kernel = sequences._Dense(2), jnp.zeros((2, 2), jnp.bfloat16)
    for outputs in (
        lambda bias: plus_bias(x, bias),
        lambda bias: layer.apply({"params": {"kernel": kernel, "bias": bias}}, x),
    ):
        assert jax.eval_shape(outputs, bias).dtype == jnp.bfloat16
        slope = jax.grad(lambda bias, outputs=outputs: jnp.asarray(outputs(bias)).sum())(bias)
        np.testing.assert_array_equal(slope, [360, 360])


@pytest.mark.thorough
def test_states_messages_and_noise_are_float32_around_a_model_in_bfloat16():
    x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    population = fjs.Population.from_flat({"x": x, "y": np.arange(12) % 3}, [4, 4, 4])
    task = softmax(in_bfloat16(mlp((4,), 3, (5,))), 3)
    minibatches = fjs.Minibatches(4, steps=1)
    sim = fjs.Simulation(fjs.pmtl(task), population, fjs.full_participation(), minibatches)
    hparams = sim.hyperparameters(learning_rate=0.1, lam=0.1, clip=1.0, noise_multiplier=1e-3)
    key, _ = sim.check_start(0, hparams)
    message = sim.message_shapes(key, sim.check(hparams))
    state, _ = sim.round(sim.init(key, hparams), hparams)
    for leaf in jax.tree.leaves((message, state.shared, state.personal)):
        assert leaf.dtype == jnp.float32
    # A noise of float32 is no multiple of bfloat16's steps.
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state.shared)]
    assert any(np.any(leaf != leaf.astype(jnp.bfloat16).astype(np.float32)) for leaf in leaves)


# --- text, out of the box -------------------------------------------------------------------------

LINES = ["to be or ", "not to be", " that is ", "the quest"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Two speakers, as LEAF's files hold them: the next character, and one row that ends early."""
    users = ["HAMLET", "OPHELIA"]
    data = {"x": [*LINES, "to b"], "y": ["n", " ", "t", "i", "e"]}
    path = tmp_path_factory.mktemp("text") / "plays.json"
    path.write_text(
        json.dumps({"users": users, "num_samples": [5, 5], "user_data": dict.fromkeys(users, data)})
    )
    return path


@pytest.fixture(scope="module")
def tokens_by_place(text):
    """The same lines with a label at every place."""
    data = {"x": [line[:-1] for line in LINES], "y": [line[1:] for line in LINES]}
    path = text.with_name("places.json")
    users = ["HAMLET", "OPHELIA"]
    path.write_text(
        json.dumps({"users": users, "num_samples": [4, 4], "user_data": dict.fromkeys(users, data)})
    )
    return path


@pytest.mark.thorough
def test_text_is_learnt_out_of_the_box(text, tmp_path):
    system = "--algorithm fedavg --model gru --hidden 8 --sampling-rate 1 --noise-multiplier 0.01"
    steps = "--rounds 8 --eval-every 4 --local-optimizer adam --learning-rate 0.05 --local-epochs 3"
    flags = [*system.split(), *steps.split(), "--out", f"{tmp_path}/run"]
    assert main(["run", "--data", f"leaf:{text}", *flags]) == 0
    records = RunDirectory(tmp_path / "run").metrics()
    assert records[-1]["train_loss"] < records[1]["train_loss"]
    assert records[-1]["epsilon"] > 0


def shapes(config):
    """Of the outputs of a configuration's model, and the sentences on what is public."""
    experiment = prepare(config)
    sim = experiment.simulation
    params = sim.task.init(jax.random.key(0))
    x = sim.population.fields["x"]
    return (
        params["output"]["kernel"].shape,
        params["embedding"]["embedding"].shape,
        x,
        sim.public,
    )


@pytest.mark.thorough
def test_the_command_line_makes_the_models_that_the_text_asks_for(text, tokens_by_place):
    for model, path in (("gru", tokens_by_place), ("transformer", text)):
        config = run_config(data=f"leaf:{path}", model=model, hidden=(8,))
        output, embedding, x, public = shapes(config)
        # 80 characters, and what stands behind the end of a row, if there is one or not.
        assert (output, embedding) == ((8, 80), (81, 8))
        assert (int(x.max()) == 80) == (path == text)
        assert not any("Which characters" in sentence for sentence in public)


def test_numbers_are_no_tokens_and_text_is_no_numbers(text, tmp_path):
    with pytest.raises(ValueError, match=r"gru .*\(1797, 64\)"):
        prepare(run_config(model="gru"))
    with pytest.raises(ValueError, match=r"model .*gru, transformer"):
        prepare(run_config(data=f"leaf:{text}", model="mlp"))
    path = tmp_path / "numbers.npz"
    x = np.arange(12, dtype=np.int32).reshape(4, 3)
    np.savez(path, x=x, y=np.array([0, 1, 0, 1]), client=np.array([0, 0, 1, 1]))
    config = run_config(data=f"npz:{path}", model="transformer", hidden=(4,), test_fraction=0.5)
    sentences = prepare(config).simulation.public
    assert sentences[1].startswith(
        "The number of tokens, 12, is the largest of them of all clients"
    )
