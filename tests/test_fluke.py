"""Our algorithms beside fluke 0.8.1: equal models and predictions, and the faults behind two gaps.

All rows of a client are one minibatch, so that an epoch has no order, and fluke's server asks the
cohorts that ours draws. Needs `pip install --group fluke`.
"""

import contextlib
import copy
import dataclasses
import importlib
import importlib.metadata
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjaxsim as fjs
from fedjaxsim.algorithms.shared_model import with_personal
from fedjaxsim.models.model import Model
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


TASK = softmax(Model(lambda key: tree([jnp.asarray(leaf) for leaf in START]), apply), CLASSES)


def ours(algorithm, epochs=EPOCHS, **values) -> tuple[Any, Any, Any]:
    """Run an algorithm; return the cohorts, the published parameters and the clients' models."""
    fields = {"x": np.concatenate(X), "y": np.concatenate(Y)}
    clients = np.repeat(np.arange(len(COUNTS)), [len(y) for y in Y])
    split = np.concatenate([[0] * n + [2] * TESTS for n in COUNTS])
    population = fjs.Population.from_rows(fields, clients, len(COUNTS), split)
    minibatches = fjs.Minibatches(max(COUNTS), epochs=epochs)
    sim = fjs.Simulation(algorithm, population, fjs.fixed_size(cohort=COHORT), minibatches)
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
    models = sim.models(state, hparams)
    return cohorts, published, [jax.tree.map(lambda leaf, k=k: leaf[k], models) for k in range(5)]


@pytest.fixture(scope="module")
def fluke():
    """A function that runs an algorithm of fluke and returns its server and clients."""
    pytest.importorskip("fluke", reason="needs pip install --group fluke")
    import torch  # pyright: ignore[reportMissingImports]
    from fluke import DDict  # pyright: ignore[reportMissingImports]
    from fluke.data import FastDataLoader  # pyright: ignore[reportMissingImports]
    from fluke.nets import EncoderHeadNet  # pyright: ignore[reportMissingImports]

    assert importlib.metadata.version("fluke-fl") == "0.8.1"

    class Encoder(torch.nn.Linear):
        def forward(self, x):
            return torch.tanh(super().forward(x))

    def run(name, cohorts, start=lambda net: net, optimizer=None, server=None, **client):
        net = EncoderHeadNet(Encoder(FEATURES, HIDDEN), torch.nn.Linear(HIDDEN, CLASSES))
        for parameter, value in zip(net.parameters(), START, strict=True):
            parameter.data = torch.tensor(value)
        loaders = [
            FastDataLoader(torch.tensor(x[:n]), torch.tensor(y[:n]), num_labels=CLASSES,
                           batch_size=max(COUNTS))
            for x, y, n in zip(X, Y, COUNTS, strict=True)
        ]  # fmt: skip
        tests = [None] * len(COUNTS)
        splitter = SimpleNamespace(assign=lambda clients, size: ((loaders, tests), None))
        both = {"batch_size": 0, "loss": "CrossEntropyLoss", "local_epochs": EPOCHS, "model": net}
        both |= {"optimizer": {"lr": RATE} | (optimizer or {})}
        both |= {"scheduler": {"step_size": 1, "gamma": 1}}
        settings = {"client": both | client, "server": {"weighted": False} | (server or {})}
        settings["model"] = start(copy.deepcopy(net))
        module = importlib.import_module(f"fluke.algorithms.{name.lower()}")
        made = getattr(module, name)(len(COUNTS), splitter, DDict(settings))
        for one in made.clients:  # FedRep's would share one network
            if one.model is not None:
                one.model = copy.deepcopy(one.model)
        order = iter(cohorts)
        made.server.get_eligible_clients = lambda share: [made.clients[k] for k in next(order)]
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
