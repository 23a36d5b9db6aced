# pyright: reportMissingImports=false
"""Our algorithms beside their authors' code and Flower's, step by step; see `side_by_side.py`.

    python experiments/multi_task/side_authors.py FOLDER

FOLDER holds checkouts of alpemreacar/FedDyn, jichan3751/ifca, omarfoq/knn-per and
litian96/fair_flearn under these names; torch and flwr have to be installed, too. Their functions
run as they are, but for the changes that a row names; data, clients and faiss are replaced.
"""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from side_by_side import (
    ALL,
    CLASSES,
    CLIENTS,
    COHORTS,
    EPOCHS,
    HIDDEN,
    RATE,
    ROWS,
    SIZE,
    Net,
    Rows,
    View,
    arrays,
    batch_of,
    client_of,
    clients_of,
    difference,
    ours,
    report,
    rows_of,
    stub,
    task_of,
)  # fmt: skip

import fedjaxsim as fjs
from fedjaxsim.algorithms.shared_model import SharedModel


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

    def corrected(method, number):
        """Let Yogi correct the bias as optax does, and both divide by √v̂ + τ."""
        root = np.sqrt(1 - 0.99**number)
        method.tau = 1e-3 * root
        if isinstance(method, strategy.FedYogi):
            method.eta = 0.1 * root / (1 - 0.9**number)
            if number == 1:
                method.m_t = [np.full_like(value, -1e-6) for value in start.values()]
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
            ("w, with optax's correction of the first steps", corrected),
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
    with_flower(clients)
    fed_dyn(folder, clients)
    ifca(folder)
    knn_per(folder, clients)
    q_ffl(folder, clients)
