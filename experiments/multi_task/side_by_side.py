# pyright: reportMissingImports=false
"""Our algorithms beside PFLlib's, Flower's and their authors' code, step by step, in float64.

    python experiments/multi_task/side_by_side.py FOLDER

FOLDER holds checkouts of TsingZ0/PFLlib, alpemreacar/FedDyn, jichan3751/ifca, omarfoq/knn-per and
litian96/fair_flearn under these names; torch, h5py, scikit-learn and flwr have to be installed.
Their code runs as it is, but for the changes that a row names: only reading of data, choice of
clients, files and faiss are replaced. Both sides start from the same small network and read the
same minibatches of four clients in the same order. Printed is the largest difference of a parameter
after the last round, relative to the largest change of a parameter since the start.
"""

import ast
import contextlib
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import fedjaxsim as fjs
from fedjaxsim.algorithm import Context
from fedjaxsim.algorithms.shared_model import SharedModel
from fedjaxsim.data.minibatches import Batch
from fedjaxsim.models.model import Model
from fedjaxsim.tasks import softmax

CLIENTS, ROWS, SIZE, FEATURES, HIDDEN, CLASSES = 4, 16, 4, 5, 4, 3
COHORTS = ([0, 1], [2, 3], [1, 2], [0, 3], [1, 3])
ALL = ([0, 1, 2, 3],) * 4
RATE, SERVER_RATE, EPOCHS = 0.3, 0.7, 2
Rows = list[tuple[torch.Tensor, torch.Tensor]]


class Base(torch.nn.Linear):
    """The hidden layer, with tanh."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the representation, (b, h)."""
        return torch.tanh(super().forward(x))


class Normed(Base):
    """The hidden layer with a normalization."""

    def __init__(self, *args: int):
        super().__init__(*args)
        self.bn = torch.nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the representation, (b, h)."""
        return torch.tanh(self.bn(torch.nn.Linear.forward(self, x)))


class Net(torch.nn.Module):
    """A hidden layer and a head, by the names that PFLlib reads."""

    def __init__(self, base: type[Base] = Base):
        super().__init__()
        torch.manual_seed(0)
        self.base = base(FEATURES, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (b, c)."""
        return self.head(self.base(x))


def arrays(net: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return parameters by name."""
    return {name: value.detach().numpy().copy() for name, value in net.named_parameters()}


def task_of(net: torch.nn.Module) -> fjs.Task:
    """Return the same network as a task, started at the same parameters."""
    start = {name: jnp.asarray(value) for name, value in arrays(net).items()}

    def represent(params, x):
        hidden = x @ params["base.weight"].T + params["base.bias"]
        if "base.bn.weight" in params:
            hidden = jax.nn.standardize(hidden, epsilon=1e-5)
            hidden = hidden * params["base.bn.weight"] + params["base.bn.bias"]
        return jnp.tanh(hidden)

    def apply(params, x):
        return represent(params, x) @ params["head.weight"].T + params["head.bias"]

    return softmax(Model(lambda key: start, apply, "head", None, represent), CLASSES)


def batch_of(rows: Rows) -> Batch:
    """Return all rows of a client."""
    x, y = (jnp.asarray(torch.stack(part).numpy()) for part in zip(*rows, strict=True))
    return Batch({"x": x, "y": y}, jnp.ones(len(y)))


class View:
    """One client's minibatches of `size` rows, in their order, for an algorithm's `client`."""

    generates, count = False, jnp.int32(ROWS)
    minibatches = SimpleNamespace(steps=None, size=SIZE)

    def __init__(self, rows: Batch, size: int, epochs: int):
        self.rows, self.steps = rows, ROWS // size * epochs

        def cut(leaf):
            parts = leaf.reshape(-1, size, *leaf.shape[1:])
            return jnp.concatenate([parts] * epochs)

        self.parts = jax.tree.map(cut, rows)

    def fold(self, step, carry):
        """Fold over the round's minibatches."""
        return jax.lax.scan(lambda carry, batch: (step(carry, batch), None), carry, self.parts)[0]

    def full_pass(self, step, carry):
        """Fold over all rows."""
        return step(carry, self.rows)

    def num_steps(self):
        """Return the number of minibatches of a round."""
        return jnp.int32(self.steps)

    def batch_shapes(self):
        """Return the shapes of a batch."""
        return self.rows


CONTEXT = Context(np.int32(0), None, np.int32(0), CLIENTS, np.ones(()))  # type: ignore


def client_of(algorithm, size=SIZE, epochs=EPOCHS):
    """Return an algorithm's compiled `client`, of rows and a dict of hyperparameters."""

    def client(shared, personal, rows, hparams):
        view: Any = View(rows, size, epochs)
        return algorithm.client(shared, personal, view, SimpleNamespace(**hparams), CONTEXT)

    return jax.jit(client)


def ours(algorithm, clients, cohorts, size=SIZE, epochs=EPOCHS, server_rate=None, **values):
    """Run our algorithm without a mechanism: releases are means of messages.

    Returns the server state, all personal states, and the parameters that clients predict with.
    """
    values = {"learning_rate": RATE, "server_learning_rate": 1.0, "envelope_rate": 0.5} | values
    hparams: Any = SimpleNamespace(**values, sampling_rate=len(cohorts[0]) / CLIENTS)
    shared, personal = algorithm.init(jax.random.key(0), hparams)
    personal, client = [personal] * CLIENTS, client_of(algorithm, size, epochs)
    for round_, cohort in enumerate(cohorts):
        if server_rate is not None:
            hparams.server_learning_rate = server_rate[round_]
        messages = []
        for k in cohort:
            rows = batch_of(clients[k])
            personal[k], message, _ = client(shared, personal[k], rows, values)
            messages.append(message)
        release = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *messages)
        shared = algorithm.server(shared, release, hparams, round_)
    predicted = [algorithm.predict(shared, one, hparams, 0) for one in personal]
    return shared, personal, predicted


def difference(found, expected, start) -> float:
    """Return the largest difference of parameters, relative to the largest change since `start`."""
    names = [name for name in expected if found.get(name) is not None]
    assert names
    change = max(np.max(np.abs(expected[name] - start[name])) for name in names)
    return float(max(np.max(np.abs(found[name] - expected[name])) for name in names) / change)


def stub(name: str, **attributes: Any) -> None:
    """Put an empty module in the place of one that is not needed."""
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(attributes)


def report(name: str, *values: float, of: str = "w") -> None:
    """Print a row of the table."""
    print(f"| {name} | {', '.join(f'{value:.0e}' for value in values)} | {of} |", flush=True)


def rows_of(data) -> list[Rows]:
    """Return pairs of arrays as rows."""
    return [list(zip(x, y, strict=True)) for x, y in data]


def clients_of() -> list[Rows]:
    """Return the rows of all clients, with a different linear truth for each."""
    jax.config.update("jax_enable_x64", True)
    torch.set_default_dtype(torch.float64)
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(CLIENTS, FEATURES, CLASSES))
    x = rng.normal(size=(CLIENTS, ROWS, FEATURES))
    y = np.argmax(x @ truth, axis=-1)
    print("| algorithm | difference | of |\n| --- | --- | --- |")
    return rows_of(zip(map(torch.tensor, x), map(torch.tensor, y), strict=True))


class PFLlib:
    """PFLlib's server and clients of an algorithm."""

    def __init__(self, folder: Path, clients: list[Rows]):
        sys.path.insert(0, str(folder / "system"))
        stub("utils.dlg", DLG=None)
        stub("utils.data_utils", read_client_data=lambda dataset, k, **options: clients[k])
        from flcore.clients import clientbase

        def loader(rows, size, drop_last, shuffle):
            del shuffle
            return torch.utils.data.DataLoader(rows, size, drop_last=drop_last)

        clientbase.DataLoader = loader

    def run(self, module, name, net, cohorts, change=lambda server: None, **values):
        """Run the class `name` of flcore/servers/`module`, after a `change`; return its server."""
        off = (
            "random_join_ratio few_shot learning_rate_decay auto_break dlg_eval client_drop_rate "
            "train_slow_rate send_slow_rate num_new_clients algorithm dataset save_folder_name "
            "time_select goal top_cnt dlg_gap batch_num_per_client fine_tuning_epoch_new"
        )
        settings = SimpleNamespace(
            **dict.fromkeys(off.split(), 0), model=net, device="cpu", num_classes=CLASSES,
            batch_size=SIZE, local_learning_rate=RATE, local_epochs=EPOCHS, plocal_epochs=EPOCHS,
            learning_rate_decay_gamma=1.0, global_rounds=len(cohorts) - 1, num_clients=CLIENTS,
            join_ratio=len(cohorts[0]) / CLIENTS, time_threthold=1e9, eval_gap=10**9,
        )  # fmt: skip
        vars(settings).update(values)
        server = getattr(__import__(f"flcore.servers.{module}", fromlist=[name]), name)(settings, 0)
        order = iter(cohorts)
        server.select_clients = lambda: [server.clients[k] for k in next(order)]
        server.save_results = server.save_global_model = lambda: None
        change(server)
        with contextlib.redirect_stdout(None):
            server.train()
        return server


def with_pfllib(folder: Path, clients: list[Rows]) -> None:
    """Compare server models, and the clients' parts where the rule is the same."""
    library = PFLlib(folder, clients)
    start, task = arrays(Net()), task_of(Net())

    def gap(shared, server):
        return difference(shared.params, arrays(server.global_model), start)

    def personal(server, models):
        found = [arrays(client.model) for client in server.clients]
        return max(difference(m, f, start) for m, f in zip(models, found, strict=True))

    server = library.run("serveravg", "FedAvg", Net(), COHORTS)
    report("FedAvg", gap(ours(fjs.fedavg(task), clients, COHORTS)[0], server))

    rates: dict[str, Any] = {"server_learning_rate": SERVER_RATE}
    server = library.run("serverscaffold", "SCAFFOLD", Net(), COHORTS, **rates)
    shared, d_i, _ = ours(fjs.scaffold(task, message="update"), clients, COHORTS, **rates)
    zero, scale = jax.tree.map(np.zeros_like, start), RATE * EPOCHS * ROWS / SIZE
    variates = [dict(zip(start, map(np.asarray, k.client_c), strict=True)) for k in server.clients]
    scaled = [jax.tree.map(lambda leaf: -leaf / scale, d) for d in d_i]
    worst = max(difference(*pair, zero) for pair in zip(scaled, variates, strict=True))
    report("SCAFFOLD", gap(shared.model, server), worst, of="x; c_i")

    def no_decay(server):
        for client in server.clients:
            client.optimizer.param_groups[0]["mu"] = 0

    rates = {"lam": 0.8, "learning_rate": 0.2, **rates}
    shared, _, _ = ours(fjs.pfedme(task, inner_steps=3), clients, COHORTS, **rates)
    theirs = {"beta": SERVER_RATE, "lamda": 0.8, "K": 3, "p_learning_rate": 0.2}
    for of, change in (("w, without its weight decay", no_decay), ("w", lambda server: None)):
        server = library.run(
            "serverpFedMe", "pFedMe", Net(), COHORTS, change, local_learning_rate=0.5, **theirs
        )
        report("pFedMe", gap(shared, server), of=of)
    server.send_models()
    [evaluated, *_] = [
        dict(zip(start, (p.detach().numpy() for p in k.personalized_params), strict=True))
        for k in server.clients
    ]
    same = difference(evaluated, arrays(server.global_model), start)
    report("pFedMe", same, of="PFLlib's personal models, when it evaluates them, less its w")

    server = library.run("serverperavg", "PerAvg", Net(), COHORTS)
    twice: dict[str, Any] = {"size": 2 * SIZE, "epochs": 2 * EPOCHS, "adaptation_rate": RATE}
    shared, _, _ = ours(fjs.perfedavg(task), clients, COHORTS, **twice)
    report("Per-FedAvg, first order", gap(shared, server))

    norm = torch.norm
    shared, _, _ = ours(fjs.feddyn(task, message="update"), clients, COHORTS, lam=0.4)
    for of, rule in (("θ, with ‖·‖² for its ‖·‖", lambda a, p: torch.sum(a * a)), ("θ", norm)):
        torch.norm = rule
        server = library.run("serverdyn", "FedDyn", Net(), COHORTS, alpha=0.4)
        torch.norm = norm
        report("FedDyn", gap(shared, server), of=of)

    def one_pass(server):
        for client in server.clients:
            client.ALA.threshold, client.ALA.num_pre_loss = np.inf, 0

    all_layers = {"eta": 1.0, "rand_percent": 100, "layer_idx": 0, "local_epochs": 1}
    server = library.run("serverala", "FedALA", Net(), ALL, one_pass, **all_layers)
    shared, states, _ = ours(fjs.fedala(task), clients, ALL, epochs=1, aggregation_rate=1.0)
    worst = personal(server, [one.params for one in states])
    report("FedALA", gap(shared, server), worst, of="w; θ_i, one pass in each round")

    def base_only(server):
        server.global_model = server.global_model.base

    head = ["head.weight", "head.bias"]
    for name, make in (("FedPer", fjs.fedper), ("FedRep", fjs.fedrep)):
        server = library.run(f"server{name[3:].lower()}", name, Net(), COHORTS, base_only)
        shared, heads, _ = ours(make(task, head=head), clients, COHORTS)
        trunk = {f"base.{key}": value for key, value in arrays(server.global_model).items()}
        worst = personal(server, [{key: one[key] for key in head} for one in heads])
        report(name, difference(shared.trunk.params, trunk, start), worst, of="trunk; heads")

    net = Net(Normed)
    start, norms = arrays(net), ["base.bn.weight", "base.bn.bias"]
    server = library.run("serverbn", "FedBN", net, COHORTS)
    shared, states, _ = ours(fjs.fedbn(task_of(net), head=norms), clients, COHORTS)
    worst = personal(server, [{key: one[key] for key in norms} for one in states])
    report("FedBN", gap(shared.trunk, server), worst, of="w; normalizations (LayerNorm)")

    start = arrays(Net())
    server = library.run("serverapfl", "APFL", Net(), COHORTS, alpha=0.5)
    shared, _, predicted = ours(fjs.apfl(task, adaptive=True), clients, COHORTS, mixture=0.5)
    found = [arrays(client.model_per) for client in server.clients]
    worst = max(difference(*pair, start) for pair in zip(predicted, found, strict=True))
    report("APFL", gap(shared, server), worst, of="w; models of predictions, adaptive α")


def with_flower(clients: list[Rows]) -> None:
    """Compare the server optimizers with Flower's strategies on the same clients' models."""
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.server import strategy

    start, task = arrays(Net()), task_of(Net())
    client, initial = client_of(fjs.fedavg(task)), ndarrays_to_parameters(list(start.values()))

    def flower(method, first=0, before=lambda method, number: None):
        weights = start
        for number, cohort in enumerate(COHORTS, first):
            results: Any = []
            for k in cohort:
                shared = SharedModel({n: jnp.asarray(v) for n, v in weights.items()}, ())
                update = client(shared, (), batch_of(clients[k]), {"learning_rate": RATE})[1]
                sent = ndarrays_to_parameters([np.asarray(weights[n] + update[n]) for n in start])
                results.append((None, FitRes(Status(Code.OK, ""), sent, ROWS, {})))
            before(method, number + 1)
            found, _ = method.aggregate_fit(number, results, [])
            weights = dict(zip(start, parameters_to_ndarrays(found), strict=True))
        return weights

    def as_in_paper(method, number):
        """Start v at τ², and take back the correction of the bias, which Flower's FedAdam makes."""
        if isinstance(method, strategy.FedAdam):
            method.eta = 0.1 * (1 - 0.9**number) / np.sqrt(1 - 0.99**number)
        if number == 1:
            method.m_t = [np.zeros_like(value) for value in start.values()]
            method.v_t = [np.full_like(value, 1e-6) for value in start.values()]

    momentum = strategy.FedAvgM(
        server_learning_rate=0.5, server_momentum=0.9, initial_parameters=initial
    )
    shared, _, _ = ours(fjs.fedavgm(task), clients, COHORTS, server_learning_rate=0.5)
    report("FedAvgM, Flower", difference(shared.params, flower(momentum, 1), start))
    for name, make in (("FedAdam", fjs.fedadam), ("FedYogi", fjs.fedyogi)):
        shared, _, _ = ours(make(task), clients, COHORTS, server_learning_rate=0.1)
        options = {"eta": 0.1, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3}
        for of, before in (
            ("w", lambda method, number: None),
            ("w, with the paper's first state and steps", as_in_paper),
        ):
            method = getattr(strategy, name)(initial_parameters=initial, **options)
            theirs = flower(method, before=before)
            report(f"{name}, Flower", difference(shared.params, theirs, start), of=of)


def fed_dyn(folder: Path, clients: list[Rows]) -> None:
    """Compare the server's model and the predictions with FedDyn's authors."""
    start, task = arrays(Net()), task_of(Net())
    source = ast.parse((folder / "FedDyn" / "utils_general.py").read_text())
    wanted = ("train_feddyn_mdl", "get_mdl_params")
    source.body = [part for part in source.body if getattr(part, "name", "") in wanted]

    def batches(rows, batch_size, shuffle):
        del shuffle
        return torch.utils.data.DataLoader(rows, batch_size)

    space: dict[str, Any] = {
        "torch": torch, "np": np, "device": "cpu", "max_norm": 1e9,
        "data": SimpleNamespace(DataLoader=batches),
        "Dataset": lambda x, y, **options: torch.utils.data.TensorDataset(x, y),
    }  # fmt: skip
    exec(compile(source, "utils_general.py", "exec"), space)
    flat = torch.nn.utils.parameters_to_vector
    cloud = average = flat(Net().parameters()).detach()
    local = torch.zeros(CLIENTS, len(cloud))
    for cohort in COHORTS:
        models = []
        for k in cohort:
            net = Net()
            torch.nn.utils.vector_to_parameters(cloud.clone(), net.parameters())
            x, y = (torch.stack(part) for part in zip(*clients[k], strict=True))
            net = space["train_feddyn_mdl"](
                net, Net, 0.4, cloud, local[k].clone(), x, y, RATE, SIZE, EPOCHS, 10**9, 0.0, ""
            )
            models.append(flat(net.parameters()).detach())
            local[k] += models[-1] - cloud
        average = torch.stack(models).mean(0)
        cloud = average + local.mean(0)
    shared, _, predicted = ours(fjs.feddyn(task, message="update"), clients, COHORTS, lam=0.4)
    net = Net()
    rows = []
    for vector, mine in ((cloud, shared.params), (average, predicted[0])):
        torch.nn.utils.vector_to_parameters(vector, net.parameters())
        rows.append(difference(mine, arrays(net), start))
    report("FedDyn, authors", *rows, of="θ; the model of predictions")


def ifca(folder: Path) -> None:
    """Compare gradient averaging of a linear regression with IFCA's authors."""
    sys.path.insert(0, str(folder / "ifca" / "synthetic"))
    argv, sys.argv = sys.argv, sys.argv[:1]
    import train_cluster

    sys.argv = argv
    rng = np.random.default_rng(1)
    truths = [np.array([2.0, -1, 0.5]), np.array([-1.5, 1, 1])]
    x = rng.normal(size=(CLIENTS, ROWS, 3))
    y = np.stack([x[k] @ truths[k % 2] for k in range(CLIENTS)])
    data = [tuple(map(torch.tensor, pair)) for pair in zip(x, y, strict=True)]
    config = {
        "train_seed": 0, "m": CLIENTS, "p": 2, "d": 3, "n": ROWS, "score": "set",
        "project_dir": ".", "dataset_dir": ".",
    }  # fmt: skip
    theirs = train_cluster.TrainCluster(config)
    theirs.setup({"data": data, "params": [torch.tensor(t)[None] for t in truths]})
    models = rng.normal(size=(2, 3))
    for model, values in zip(theirs.models, models, strict=True):
        model.weight().data = torch.tensor(values)[None]
    linear = fjs.tasks.squared(fjs.models.linear((3,), 1, bias=False))
    algorithm = fjs.ifca(linear)
    rates: Any = SimpleNamespace(separation=0.1, server_learning_rate=1.0)
    state, _ = algorithm.init(jax.random.key(0), rates)
    state = state._replace(params={"kernel": jnp.asarray(models)[:, None]})
    algorithm = algorithm._replace(init=lambda key, hparams: (state, jnp.int32(0)))
    # Their loss is twice ours, ‖Xw − y‖²/(2n).
    for _ in ALL:
        theirs.train(lr=RATE / 2)
    shared, clusters, _ = ours(algorithm, rows_of(data), ALL, size=ROWS, epochs=1)
    expected = {"kernel": np.stack([m.weight().detach().numpy() for m in theirs.models])}
    assert {int(c) for c in clusters} == {0, 1}
    change = difference(shared.params, expected, {"kernel": models[:, None]})
    report("IFCA, authors", change, of="both clusters, gradient averaging")


def knn_per(folder: Path, clients: list[Rows]) -> None:
    """Compare predicted probabilities of one network with those of kNN-Per's authors."""
    sys.path.insert(0, str(folder / "knn-per"))

    class Index:
        """Faiss' exact search, by distances or their squares."""

        squared = False

        def __init__(self, dimension):
            del dimension

        def add(self, keys):
            self.keys = keys

        def search(self, features, k):
            squares = ((features[:, None] - self.keys) ** 2).sum(-1)
            order = np.argsort(squares, axis=1, kind="stable")[:, :k]
            squares = np.take_along_axis(squares, order, axis=1)
            return (squares if self.squared else np.sqrt(squares)), order

    stub("faiss", IndexFlatL2=Index)
    import client as theirs

    net, task = Net(), task_of(Net())
    algorithm = fjs.knnper(task, neighbours=5, datastore=ROWS)
    hparams: Any = SimpleNamespace(neighbour_weight=0.3, neighbour_scale=0.8)
    shared: Any = SimpleNamespace(params={n: jnp.asarray(v) for n, v in arrays(net).items()})
    view: Any = View(batch_of(clients[0]), SIZE, 1)
    (keys, stored), (asked, _) = (map(torch.stack, zip(*clients[k], strict=True)) for k in (0, 1))
    assert algorithm.predict_with_data
    assert algorithm.task.model
    params = algorithm.predict_with_data(shared, (), view, hparams, jnp.int32(0))
    logits = algorithm.task.model.apply(params, jnp.asarray(asked.numpy()))
    for squared in (False, True):
        Index.squared = squared
        peer = theirs.KNNPerClient.__new__(theirs.KNNPerClient)
        vars(peer).update(
            features_dimension=HIDDEN, num_classes=CLASSES, features_flag=True, _KNNPerClient__k=5,
            _KNNPerClient__capacity=ROWS, datastore=theirs.DataStore(ROWS, "random", HIDDEN, None),
        )  # fmt: skip
        with torch.no_grad():
            peer.train_features, peer.train_labels = net.base(keys).numpy(), stored.numpy()
            peer.test_features = net.base(asked).numpy()
            outputs = torch.softmax(net(asked), 1).numpy()
        peer.build_datastore()
        peer.gather_knn_outputs(scale=0.8 / HIDDEN)
        mixed = 0.3 * peer.test_knn_outputs + 0.7 * outputs
        gap = float(np.max(np.abs(np.exp(logits) - mixed)))
        report("kNN-Per, authors", gap, of="probabilities" + ", of squared distances" * squared)


def q_ffl(folder: Path, clients: list[Rows]) -> None:
    """Compare with q-FFL's authors; our server's step is set to theirs."""
    sys.path.insert(0, str(folder / "fair_flearn"))
    stub("tensorflow", train=SimpleNamespace(GradientDescentOptimizer=None))
    from flearn.trainers.qffedavg import Server

    start, task = arrays(Net()), task_of(Net())
    fairness, divisors = 2.0, []
    client = client_of(fjs.fedavg(task))

    class Peer:
        """A client by the names that their server calls."""

        def __init__(self, k):
            self.rows = batch_of(clients[k])

        def set_params(self, weights):
            self.weights = weights

        def get_params(self):
            return self.weights

        def named(self):
            return {n: jnp.asarray(w) for n, w in zip(start, self.weights, strict=True)}

        def get_loss(self):
            return float(task.loss(self.named(), self.rows))

        def solve_inner(self, num_epochs, batch_size):
            del num_epochs, batch_size
            shared = SharedModel(self.named(), ())
            update = client(shared, (), self.rows, {"learning_rate": RATE})[1]
            return (ROWS, [w + np.asarray(update[n]) for n, w in self.named().items()]), None

    server: Any = Server.__new__(Server)
    order = iter(COHORTS)
    vars(server).update(
        clients=[Peer(k) for k in range(CLIENTS)], num_rounds=len(COHORTS) - 1, q=fairness,
        clients_per_round=2, latest_model=list(start.values()), learning_rate=RATE,
        num_epochs=EPOCHS, batch_size=SIZE, eval_every=10**9, log_interval=10**9,
        client_model=SimpleNamespace(close=lambda: None),
    )  # fmt: skip
    server.test = server.train_error = server.validate = lambda: ([1], [0])

    def select_clients(**options):
        del options
        return None, np.array([server.clients[k] for k in next(order)])

    server.select_clients = select_clients
    aggregate = server.aggregate2

    def recorded(before, deltas, parts):
        divisors.append(float(np.sum(parts)))
        return aggregate(before, deltas, parts)

    server.aggregate2 = recorded
    server.train()
    rates_of = [2 / (RATE * divisor) for divisor in divisors]
    shared, _, _ = ours(fjs.qffl(task), clients, COHORTS, fairness=fairness, server_rate=rates_of)
    theirs = dict(zip(start, server.latest_model, strict=True))
    gap = difference(shared.params, theirs, start)
    report("q-FFL, authors", gap, of="w, their divisor as our server's step")


if __name__ == "__main__":
    folder, clients = Path(sys.argv[1]), clients_of()
    with_pfllib(folder / "PFLlib", clients)
    with_flower(clients)
    fed_dyn(folder, clients)
    ifca(folder)
    knn_per(folder, clients)
    q_ffl(folder, clients)
