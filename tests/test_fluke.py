"""Our algorithms beside fluke 0.8.1: equal models and predictions, and the faults behind two gaps.

All rows of a client are one minibatch, so that an epoch has no order, and fluke's server asks the
cohorts that ours draws. Needs `pip install --group libraries`.
"""

import contextlib
import copy
import dataclasses
import importlib
import importlib.metadata
import os
import pathlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjaxsim as fjs
from fedjaxsim.algorithms.shared_model import with_personal
from fedjaxsim.models.model import Model
from fedjaxsim.runs.parts import find_user_code
from fedjaxsim.tasks import softmax

# Warnings of fluke's own imports and deprecations.
pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]
COUNTS, TESTS, FEATURES, HIDDEN, CLASSES = (4, 9, 6, 12, 7), 20, 5, 4, 3
COHORT, ROUNDS, EPOCHS, RATE = 3, 6, 2, 0.5
RNG = np.random.default_rng(0)
TRUTH = RNG.normal(size=(len(COUNTS), FEATURES, CLASSES))
X = [RNG.normal(size=(n + TESTS, FEATURES)).astype(np.float32) for n in COUNTS]
Y = [np.argmax(x @ w, axis=1) for x, w in zip(X, TRUTH, strict=True)]
SIZES = ((HIDDEN, FEATURES), (HIDDEN,), (CLASSES, HIDDEN), (CLASSES,))
START = [(RNG.normal(size=size) / 2).astype(np.float32) for size in SIZES]
"""Weights and offsets of the hidden layer and the head, in the order of fluke's parameters."""


def apply(params, x):
    (w, b), (v, a) = params["encoder"], params["head"]
    return jnp.tanh(x @ w.T + b) @ v.T + a


def tree(arrays):
    return {"encoder": (arrays[0], arrays[1]), "head": (arrays[2], arrays[3])}


def represent(params, x):
    w, b = params["encoder"]
    return jnp.tanh(x @ w.T + b)


MODEL = Model(
    lambda key: tree([jnp.asarray(leaf) for leaf in START]),
    apply,
    output_layer="head",
    representation=represent,
)
TASK = softmax(MODEL, CLASSES)
ALIKE = [np.concatenate([np.repeat(x[:1], n, 0), x[n:]]) for x, n in zip(X, COUNTS, strict=True)]
ALIKE_Y = [np.concatenate([np.repeat(y[:1], n), y[n:]]) for y, n in zip(Y, COUNTS, strict=True)]
"""Clients whose training rows are copies of one, so that any minibatches are alike."""


def gallery(name, **settings):
    folder = pathlib.Path(__file__).parents[1] / "experiments" / "gallery"
    return find_user_code("algorithm", f"{os.path.relpath(folder)}/{name}.py:{name}")(
        TASK, **settings
    )


def ours(
    algorithm, epochs=EPOCHS, cohort=COHORT, rows=(X, Y), size=max(COUNTS), **values
) -> tuple[Any, Any, Any]:
    """Run an algorithm; return the cohorts, the published parameters and the clients' models.

    The server's state is returned where an algorithm publishes no parameters.
    """
    fields = dict(zip("xy", map(np.concatenate, rows), strict=True))
    clients = np.repeat(np.arange(len(COUNTS)), [len(y) for y in Y])
    split = np.concatenate([[0] * n + [2] * TESTS for n in COUNTS])
    population = fjs.Population.from_rows(fields, clients, len(COUNTS), split)
    minibatches = fjs.Minibatches(size, epochs=epochs)
    sim = fjs.Simulation(algorithm, population, fjs.fixed_size(cohort=cohort), minibatches)
    exact = {"clip": jnp.inf, "noise_multiplier": 0.0}
    hparams = sim.hyperparameters(learning_rate=RATE, **exact, **values)
    state, arrays = sim.init(0, hparams), hparams.as_arrays()
    cohorts = [
        sim.program.draw(dataclasses.replace(state, round=jnp.int32(t)), arrays).cohort.ids.tolist()
        for t in range(ROUNDS)
    ]
    assert set().union(*cohorts) == set(range(len(COUNTS)))
    state, _ = sim.run(state, hparams, ROUNDS)
    published = sim.algorithm.warm_start.published(state.shared)
    published = state.shared if published is None else published
    models = sim.models(state, hparams)
    return cohorts, published, [jax.tree.map(lambda leaf, k=k: leaf[k], models) for k in range(5)]


@pytest.fixture(scope="module")
def fluke():
    """A function that runs an algorithm of fluke and returns its server and clients."""
    pytest.importorskip("fluke", reason="needs pip install --group libraries")
    import torch  # pyright: ignore[reportMissingImports]
    from fluke import DDict  # pyright: ignore[reportMissingImports]
    from fluke.data import FastDataLoader  # pyright: ignore[reportMissingImports]
    from fluke.nets import EncoderHeadNet  # pyright: ignore[reportMissingImports]

    assert importlib.metadata.version("fluke-fl") == "0.8.1"

    class Encoder(torch.nn.Linear):
        def forward(self, x):
            return torch.tanh(super().forward(x))

    def run(
        name, cohorts, start=lambda net: net, optimizer=None, server=None, module=None,
        rows=(X, Y), size=max(COUNTS), finalize=True, **client,
    ):  # fmt: skip
        net = EncoderHeadNet(Encoder(FEATURES, HIDDEN), torch.nn.Linear(HIDDEN, CLASSES))
        for parameter, value in zip(net.parameters(), START, strict=True):
            parameter.data = torch.tensor(value)
        loaders = [
            FastDataLoader(torch.tensor(x[:n]), torch.tensor(y[:n]), num_labels=CLASSES,
                           batch_size=size)
            for x, y, n in zip(*rows, COUNTS, strict=True)
        ]  # fmt: skip
        tests = [None] * len(COUNTS)
        splitter = SimpleNamespace(assign=lambda clients, size: ((loaders, tests), None))
        both = {"batch_size": 0, "loss": "CrossEntropyLoss", "local_epochs": EPOCHS, "model": net}
        both |= {"optimizer": {"lr": RATE} | (optimizer or {})}
        both |= {"scheduler": {"step_size": 1, "gamma": 1}}
        settings = {"client": both | client, "server": {"weighted": False} | (server or {})}
        settings["model"] = start(copy.deepcopy(net))
        found = importlib.import_module(f"fluke.algorithms.{module or name.lower()}")
        made = getattr(found, name)(len(COUNTS), splitter, DDict(settings))
        for one in made.clients:  # FedRep's would share one network
            if one.model is not None:
                one.model = copy.deepcopy(one.model)
        order = iter(cohorts)
        made.server.get_eligible_clients = lambda share: [made.clients[k] for k in next(order)]
        made.server._participants.update(range(len(COUNTS)))  # as its draw of cohorts does
        if not finalize:
            made.finalize = lambda: None
        with contextlib.redirect_stdout(None):
            made.run(ROUNDS, 1)
        return made.server, made.clients

    return run


def arrays(module):
    return [parameter.detach().numpy() for parameter in module.parameters()]


def same(found, module):
    """Compare parameters with those of a network, or of its encoder."""
    expected = arrays(module)
    leaves = [*found["encoder"], *found["head"]][: len(expected)]
    for leaf, value in zip(leaves, expected, strict=True):
        np.testing.assert_allclose(leaf, value, rtol=1e-4, atol=1e-5)


def same_tests(models, networks):
    """Compare what clients say of their test rows."""
    for x, n, model, network in zip(X, COUNTS, models, networks, strict=True):
        expected = tree(arrays(network))
        found, wanted = apply(model, x[n:]), apply(expected, x[n:])
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(np.argmax(found, axis=1), np.argmax(wanted, axis=1))


@pytest.mark.parametrize(
    ("name", "algorithm", "values", "theirs"),
    [
        ("FedAVG", fjs.fedavg(TASK), {}, {}),
        ("FedProx", fjs.fedprox(TASK), {"mu": 0.7}, {"mu": 0.7}),
        ("SCAFFOLD", fjs.scaffold(TASK), {}, {}),
    ],
)
def test_one_model_for_all_is_that_of_fluke(fluke, name, algorithm, values, theirs):
    cohorts, published, models = ours(algorithm, **values)
    server, _ = fluke(name, cohorts, **theirs)
    same(published, server.model)
    same_tests(models, [server.model] * len(COUNTS))


def test_personal_models_of_ditto_are_those_of_fluke(fluke):
    cohorts, published, models = ours(fjs.ditto(TASK, personal_epochs=3), lam=0.4)
    server, clients = fluke("Ditto", cohorts, tau=3, lam=0.4)
    same(published, server.model)
    same_tests(models, [one.personalized_model for one in clients])


@pytest.mark.parametrize(
    ("name", "algorithm", "theirs"),
    [
        ("FedPer", fjs.fedper(TASK, head="head"), {}),
        # fluke's τ is of the encoder, ours of the head.
        ("FedRep", fjs.fedrep(TASK, head="head", head_epochs=3), {"local_epochs": 3, "tau": 2}),
    ],
)
def test_personal_heads_are_those_of_fluke(fluke, name, algorithm, theirs):
    cohorts, _, models = ours(algorithm)
    server, clients = fluke(name, cohorts, lambda net: net.encoder, **theirs)
    same(models[0], server.model)
    same_tests(models, [one.model for one in clients])


def test_own_models_of_apfl_take_no_step_in_fluke(fluke):
    """Their gradients go to a copy, the mixture, which then replaces v: v ← αv + (1 − α)w_i."""
    alpha, fedavg = 0.25, fjs.fedavg(TASK)

    def client(shared, v, data, hparams, context):
        _, update, _ = fedavg.client(shared, (), data, hparams, context)
        w_i = jax.tree.map(jnp.add, shared.params, update)
        return jax.tree.map(lambda v, w: alpha * v + (1 - alpha) * w, v, w_i), update, {}

    cohorts, published, mixtures = ours(with_personal(fedavg, client))
    server, clients = fluke("APFL", cohorts, lam=alpha, server={"tau": 4})
    same(published, server.model)  # which its τ should keep from averaging in most rounds
    same_tests(mixtures, [one.personalized_model for one in clients])
    _, papers, models = ours(fjs.apfl(TASK), mixture=alpha)
    same(papers, server.model)
    assert not np.allclose(models[0]["head"][0], mixtures[0]["head"][0], atol=0.01)


def test_the_pull_of_pfedme_is_zero_in_fluke(fluke):
    """It pulls θ to θ itself and sends θ: FedAvg with K steps on each minibatch."""
    inner = 3
    cohorts, published, _ = ours(fjs.fedavg(TASK), epochs=inner * EPOCHS, server_learning_rate=0.6)
    values = {"lr": RATE, "lamda": 0.8, "mu": 0.0}
    server, _ = fluke("PFedMe", cohorts, optimizer=values, k=inner, server={"beta": 0.6})
    same(published, server.model)
    pfedme = fjs.pfedme(TASK, inner_steps=inner)
    _, papers, _ = ours(pfedme, lam=0.8, envelope_rate=RATE, server_learning_rate=0.6)
    assert not np.allclose(papers["head"][0], published["head"][0], atol=0.01)


# --- the gallery ----------------------------------------------------------------------------------

EVERYONE = {"cohort": len(COUNTS)}


def test_moon_is_that_of_fluke(fluke):
    """Everybody takes part: at its first round fluke's client compares with the shared model."""
    cohorts, published, models = ours(gallery("moon"), mu=2.0, temperature=0.5, **EVERYONE)
    server, _ = fluke("MOON", cohorts, mu=2.0, tau=0.5)
    same(published, server.model)
    same_tests(models, [server.model] * len(COUNTS))


def test_fedsam_of_fluke_climbs_along_the_last_gradient_too(fluke):
    """It does not set gradients to zero after a step: ∇ℓ(v) gets that of the step before."""
    plain = gallery("fedsam")

    def client(shared, last, data, hparams, context):
        def step(carry, batch):
            v, last = carry
            g = jax.tree.map(jnp.add, jax.grad(TASK.loss)(v, batch), last)
            size = optax.tree.norm(g) + 1e-12
            uphill = jax.tree.map(lambda a, b: a + hparams.rho / size * b, v, g)
            g = jax.grad(TASK.loss)(uphill, batch)
            return jax.tree.map(lambda a, b: a - hparams.learning_rate * b, v, g), g

        v, last = data.fold(step, (shared.params, last))
        return last, jax.tree.map(jnp.subtract, v, shared.params), {}

    def init(key, hparams):
        return plain.init(key, hparams)[0], jax.tree.map(jnp.zeros_like, TASK.init(key))

    cohorts, published, models = ours(plain._replace(init=init, client=client), rho=0.4)
    server, _ = fluke("FedSAM", cohorts, rho=0.4)
    same(published, server.model)
    same_tests(models, [server.model] * len(COUNTS))
    _, papers, _ = ours(plain, rho=0.4)
    assert not np.allclose(papers["head"][0], published["head"][0], atol=0.001)


def test_fedexp_steps_as_that_of_fluke_which_predicts_with_its_last_model(fluke):
    cohorts, (newest, last), models = ours(gallery("fedexp"), damping=1e-4)
    server, _ = fluke("FedExP", cohorts)
    same(newest, server.model)
    assert server.hyper_params.lr > 1
    mean = jax.tree.map(lambda a, b: (a + b) / 2, newest, last)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), models[0], mean)


def test_heads_of_lg_fedavg_and_own_encoders_are_those_of_fluke(fluke):
    cohorts, _, models = ours(gallery("lg_fedavg"))
    server, clients = fluke("LGFedAVG", cohorts, lambda net: net.head, module="lg_fedavg")
    for model, client in zip(models, clients, strict=True):
        same(model, client.model.get_local())
        for leaf, value in zip(model["head"], arrays(server.model), strict=True):
            np.testing.assert_allclose(leaf, value, rtol=1e-4, atol=1e-5)


def test_fedrod_is_that_of_fluke_once_own_heads_start_at_the_shared_one(fluke):
    plain = gallery("fedrod")

    def init(key, hparams):
        shared, _ = plain.init(key, hparams)
        return shared, shared.params["head"]

    cohorts, published, models = ours(plain._replace(init=init), **EVERYONE)
    server, clients = fluke("FedROD", cohorts)
    same(published, server.model)
    for model, client in zip(models, clients, strict=True):
        both = zip(model["head"], arrays(server.model)[2:], arrays(client.inner_model), strict=True)
        for leaf, of_server, own in both:
            np.testing.assert_allclose(leaf, of_server + own, rtol=1e-4, atol=1e-5)


def test_bodies_of_fedbabu_are_those_of_fluke_which_tunes_them_unreleased(fluke):
    """A client's last model is tuned with its own trained body, not with the server's."""
    plain = gallery("fedbabu")

    def client(shared, personal, data, hparams, context):
        _, update, _ = plain.client(shared, (), data, hparams, context)
        own = {"encoder": jax.tree.map(jnp.add, shared["encoder"], update["encoder"])}
        return shared | own, update, {}

    def predict_with_data(shared, own, data, hparams, client_id):
        return plain.predict_with_data(own, (), data, hparams, client_id)

    algorithm = plain._replace(
        init=lambda key, hparams: (TASK.init(key), TASK.init(key)),
        client=client,
        predict_with_data=predict_with_data,
    )
    cohorts, published, models = ours(algorithm, tuning_rate=RATE)
    server, clients = fluke(
        "FedBABU", cohorts, lambda net: net.encoder, mode="full", fine_tuning_epochs=EPOCHS
    )
    same(published, server.model)
    same_tests(models, [one.model for one in clients])


def test_fednova_of_fluke_shrinks_and_stretches_the_model(fluke):
    """Its weights τ̄/(q τ_i) of the models, not of their updates, do not add up to 1."""
    plain, other = gallery("fednova"), {"rows": (ALIKE, ALIKE_Y), "size": 7}

    def client(shared, personal, data, hparams, context):
        _, sent, _ = plain.client(shared, (), data, hparams, context)
        whole = jax.tree.map(lambda w, u: w / sent["steps"] + u, shared, sent["update"])
        return (), sent | {"update": whole}, {}

    def server(w, release, hparams, round_):
        return jax.tree.map(lambda r: release["steps"] * r, release["update"])

    cohorts, stretched, _ = ours(plain._replace(client=client, server=server), **other)
    found, _ = fluke("FedNova", cohorts, **other)
    same(stretched, found.model)
    _, papers, _ = ours(plain, **other)
    assert not np.allclose(papers["head"][0], stretched["head"][0], atol=0.01)
    # With as many steps everywhere both are FedAvg.
    cohorts, published, _ = ours(plain)
    found, _ = fluke("FedNova", cohorts)
    same(published, found.model)


def test_fedproto_of_fluke_means_the_representations_of_all_steps(fluke):
    """A client's prototypes are over all its steps and the server's weigh clients alike."""
    plain = gallery("fedproto")

    def client(shared, w, data, hparams, context):
        centres = shared["centres"]

        def step(carry, batch):
            w, sums, counts = carry
            x, y = batch.fields["x"], batch.fields["y"].astype(jnp.int32)

            def loss(w):
                apart = jnp.mean(jnp.square(represent(w, x) - centres[y]), axis=1)
                pull = jnp.where(context.round > 0, batch.mean(apart), 0)
                return TASK.loss(w, batch) + hparams.lam * pull

            rows = jax.nn.one_hot(y, CLASSES) * batch.weight[:, None]
            sums, counts = sums + rows.T @ represent(w, x), counts + rows.sum(0)
            gradient = jax.grad(loss)(w)
            w = jax.tree.map(lambda a, g: a - hparams.learning_rate * g, w, gradient)
            return w, sums, counts

        nothing = jnp.zeros((CLASSES, HIDDEN)), jnp.zeros(CLASSES)
        w, sums, counts = data.fold(step, (w, *nothing))
        means = sums / jnp.maximum(counts, 1)[:, None]
        return w, {"centres": means, "known": (counts > 0).astype(float)}, {}

    def server(shared, release, hparams, round_):
        found = release["known"] > 0
        centres = release["centres"] / jnp.where(found, release["known"], 1)[:, None]
        kept = jnp.where(found[:, None], centres, shared["centres"])
        return {"centres": kept, "known": jnp.maximum(shared["known"], found)}

    algorithm = plain._replace(
        init=lambda key, hparams: (
            {"centres": jnp.zeros((CLASSES, HIDDEN)), "known": jnp.zeros(CLASSES)},
            TASK.init(key),
        ),
        client=client,
        server=server,
        predict=lambda shared, w, hparams, client_id: w,
        task=TASK,
    )
    cohorts, shared, models = ours(algorithm, lam=0.7, **EVERYONE)
    found, clients = fluke(
        "FedProto", cohorts, lambda net: None, lam=0.7, n_protos=CLASSES, finalize=False,
        server={"n_protos": CLASSES},
    )  # fmt: skip
    np.testing.assert_allclose(
        shared["centres"], [one.numpy() for one in found.prototypes], rtol=1e-4, atol=1e-5
    )
    same_tests(models, [one.model for one in clients])
    _, _, others = ours(plain, lam=0.7, **EVERYONE)
    assert not np.allclose(others[0].model["head"][0], models[0]["head"][0], atol=0.001)
