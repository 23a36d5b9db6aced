# pyright: reportMissingImports=false
"""FedAvg on FEMNIST in pfl-research on torch, plain or with its own central DP.

It runs in an environment of its own; `compare.py` starts it. Several workers, which divide a cohort
among them, are started by `python -m torch.distributed.run`; the first one reports for all.
"""

import importlib.metadata
import math
import time

import child
import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism
from torch import nn
from torch.nn import functional


class CNN(nn.Module):
    """The papers' network, with the loss and the metrics of pfl's protocol."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Flatten(), nn.Linear(1024, child.CLASSES),
        )  # fmt: skip
        for parameter in self.parameters():  # LeCun's, which the JAX libraries start from
            if parameter.ndim == 1:
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=1 / math.sqrt(parameter[0].numel()))

    def forward(self, x):
        """Return logits (b, 62) of images (b, 1, 28, 28)."""
        return self.layers(x)

    def loss(self, x, y):
        """Return the mean cross-entropy of a minibatch."""
        return functional.cross_entropy(self(x), y)

    def metrics(self, x, y):
        """Return the metrics that pfl reports in the first round."""
        correct = (self(x).argmax(dim=1) == y).sum().item()
        return {"accuracy": Weighted(correct, len(y))}


class Clock(TrainingProcessCallback):
    """The time at the start and at the end of every round."""

    def __init__(self):
        self.times = [time.perf_counter()]

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Note the time; pfl calls it."""
        del aggregate_metrics, model, central_iteration
        self.times.append(time.perf_counter())
        return False, Metrics()


def tensors(x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (n, 1, 28, 28) and labels (n,)."""
    images = torch.from_numpy(x.reshape(-1, 1, child.SIDE, child.SIDE))
    return images, torch.from_numpy(y.astype(np.int64))


def training_data(clients: child.Clients) -> FederatedDataset:
    """Make the tensors of every client once; pfl draws cohorts uniformly with replacement."""
    users = [
        PyTorchTensorDataset(tensors(x, y), user_id=str(k))
        for k, (x, y) in enumerate(clients.train)
    ]
    return FederatedDataset(users.__getitem__, get_user_sampler("random", range(len(users))))


def train(args, network: CNN, clients: child.Clients) -> list[float]:
    """Train; return the times at the start and after each round."""
    server = torch.optim.SGD(network.parameters(), lr=1.0)
    model = PyTorchModel(network, torch.optim.SGD, server)
    mechanism = GaussianMechanism(child.CLIP, child.NOISE_MULTIPLIER)
    private = [CentrallyAppliedPrivacyMechanism(mechanism)] if args.what == "dp" else []
    data = training_data(clients)
    backend = SimulatedBackend(training_data=data, val_data=data, postprocessors=private)
    rounds, clock = args.warm + args.rounds, Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,  # in the first round, which is not timed, and never after
            train_cohort_size=child.COHORT,
            val_cohort_size=None,
        ),
        backend,
        model,
        NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=child.LEARNING_RATE,
            local_batch_size=child.BATCH,
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    return clock.times


def main() -> None:
    """Train, test at the end, and report."""
    args = child.parse()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002 - pfl draws cohorts and noise from the global state
    clients, network = child.read_clients(args.data), CNN()
    times = train(args, network, clients)
    x, y = tensors(*clients.all_tests())
    with torch.no_grad():
        accuracy = (network(x).argmax(dim=1) == y).double().mean().item()
    versions = {name: importlib.metadata.version(name) for name in ("pfl", "torch")}
    numbers = child.report(args, times, accuracy, versions)
    workers = get_framework_module().distributed
    numbers["peak_mb"] = workers.all_reduce([torch.tensor([numbers["peak_mb"]])])[0].item()
    if workers.global_rank == 0:
        child.emit(numbers)


if __name__ == "__main__":
    main()
