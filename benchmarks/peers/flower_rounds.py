# pyright: reportMissingImports=false
"""FedAvg in Flower's simulation engine, with its own central DP.

It runs in an environment of its own; `compare.py` starts it. The setting begins with the number of
workers. A worker reads the clients' file and makes its network once; Flower clips at the server.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import sys

import child
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import Message
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from flwr.simulation import run_simulation
from torch.nn import functional
from torch_networks import accuracy, network, tensors


def train(workload: str, path: str, message: Message, context) -> Message:
    """Train the network of a message on a client's rows, for an epoch; reply with its weights."""
    x, y = worker(workload, path)[1][context.node_config["partition-id"]]
    learner = worker(workload, path)[0]
    learner.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(learner.parameters(), child.WORKLOADS[workload].learning_rate)
    for rows in torch.randperm(len(x)).split(child.BATCH):
        optimizer.zero_grad()
        functional.cross_entropy(learner(x[rows]), y[rows]).backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(learner.state_dict()), "metrics": MetricRecord({"num-examples": 1}),
    }  # fmt: skip
    return Message(content=RecordDict(content), reply_to=message)


@functools.cache
def worker(workload: str, path: str) -> tuple[torch.nn.Module, list]:
    """Return what a worker keeps: a network, and the tensors of each client's rows."""
    torch.set_num_threads(1)
    rows = [tensors(workload, *each) for each in child.read_clients(path).train]
    return network(workload, rows[0][0][0].numel()), rows


def main() -> None:
    """Train, test at the end, and report."""
    args = child.parse()
    about, clients = child.WORKLOADS[args.workload], child.read_clients(args.data)
    torch.manual_seed(args.seed)
    learner = network(args.workload, clients.train[0][0][0].size)
    clock, size = child.Clock(args.warm, args.rounds), len(clients.train)
    server, client = ServerApp(), ClientApp()
    # Of the module, not of the script: a worker imports it once and keeps what it has read.
    client.train()(functools.partial(imported().train, args.workload, str(args.data)))

    @server.main()
    def _(grid, context):
        del context
        fedavg = FedAvg(
            fraction_train=about.cohort / size + 1e-9, fraction_evaluate=0.0,
            min_train_nodes=about.cohort, min_available_nodes=size,
        )  # fmt: skip
        strategy = DifferentialPrivacyServerSideFixedClipping(
            fedavg, child.NOISE_MULTIPLIER, child.CLIP, about.cohort
        )
        result = strategy.start(
            grid, ArrayRecord(learner.state_dict()), clock.warm + clock.rounds,
            evaluate_fn=lambda t, arrays: clock.tick() if t else None,
        )  # fmt: skip
        learner.load_state_dict(result.arrays.to_torch_state_dict())
        found = accuracy([learner] * size, clients, args.workload)
        reports.append(clock.report(args, found, versions))

    versions = {name: importlib.metadata.version(name) for name in ("flwr", "ray", "torch")}
    reports: list[dict] = []
    workers = int(args.setting.split()[0])
    with contextlib.redirect_stdout(sys.stderr):
        run_simulation(
            server, client, size,
            backend_config={
                "init_args": {"num_cpus": workers}, "client_resources": {"num_cpus": 1},
            },
        )  # fmt: skip
    child.emit(reports[0])


def imported():
    """Return this file as a module."""
    return importlib.import_module("flower_rounds")


if __name__ == "__main__":
    main()
