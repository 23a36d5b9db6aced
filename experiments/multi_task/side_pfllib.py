# pyright: reportMissingImports=false
"""Our algorithms beside PFLlib's, step by step; see `side_by_side.py`.

    python experiments/multi_task/side_pfllib.py FOLDER

FOLDER is a checkout of TsingZ0/PFLlib; torch, h5py and scikit-learn have to be installed, too. Its
code runs as it is, but for the changes that a row names: only its reading of data, choice of
clients and files are replaced.
"""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import torch
from side_by_side import (
    ALL,
    CLASSES,
    CLIENTS,
    COHORTS,
    EPOCHS,
    RATE,
    ROWS,
    SERVER_RATE,
    SIZE,
    Net,
    Normed,
    Rows,
    arrays,
    clients_of,
    difference,
    ours,
    report,
    stub,
    task_of,
)  # fmt: skip

import fedjaxsim as fjs


class PFLlib:
    """PFLlib's server and clients of an algorithm.

    Args:
      folder: of the checkout.
      clients: their rows.
    """

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
        """Run an algorithm and return its server.

        Args:
          module: the file in flcore/servers.
          name: the class.
          net: the network, as it starts.
          cohorts: clients of each round.
          change: what is done to the server before it trains.
          **values: settings, in place of those of all algorithms.
        """
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


if __name__ == "__main__":
    with_pfllib(Path(sys.argv[1]), clients_of())
