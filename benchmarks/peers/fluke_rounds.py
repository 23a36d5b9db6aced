# pyright: reportMissingImports=false
"""FedAvg and Ditto in fluke, whose own DP is of examples, so that its runs have none.

It runs in an environment of its own; `compare.py` starts it.
"""

import contextlib
import copy
import importlib
import importlib.metadata
import sys
from types import SimpleNamespace

import child
import numpy as np
import torch
from fluke import DDict
from fluke.data import FastDataLoader
from torch_networks import accuracy, network, tensors


def main() -> None:
    """Train, test at the end, and report."""
    args = child.parse()
    about, clients = child.WORKLOADS[args.workload], child.read_clients(args.data)
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002 - fluke draws cohorts from the global state
    loaders = [
        FastDataLoader(*tensors(args.workload, x, y), num_labels=about.classes,
                       batch_size=child.BATCH, shuffle=True, skip_singleton=False)
        for x, y in clients.train
    ]  # fmt: skip
    tests = [None] * len(loaders)
    splitter = SimpleNamespace(assign=lambda clients, size: ((loaders, tests), None))
    start = network(args.workload, clients.train[0][0][0].size)
    personal = args.system == "ditto"
    client = {
        "batch_size": child.BATCH, "loss": "CrossEntropyLoss", "local_epochs": 1,
        "optimizer": {"lr": about.learning_rate}, "scheduler": {"step_size": 1, "gamma": 1},
    } | ({"model": start, "tau": 1, "lam": child.LAM} if personal else {})  # fmt: skip
    name = "Ditto" if personal else "FedAVG"
    module = importlib.import_module(f"fluke.algorithms.{name.lower()}")
    settings = {"client": client, "server": {"weighted": False}, "model": copy.deepcopy(start)}
    made = getattr(module, name)(len(loaders), splitter, DDict(settings))
    clock = child.Clock(args.warm, args.rounds)
    made.attach(SimpleNamespace(end_round=lambda **_: clock.tick()))
    with contextlib.redirect_stdout(sys.stderr):
        made.run(args.warm + args.rounds, about.cohort / len(loaders) + 1e-9, finalize=False)
    own = [made.server.model] * len(loaders)
    if personal:
        own = [one.personalized_model for one in made.clients]
    versions = {name: importlib.metadata.version(name) for name in ("fluke-fl", "torch")}
    child.emit(clock.report(args, accuracy(own, clients, args.workload), versions))


if __name__ == "__main__":
    main()
