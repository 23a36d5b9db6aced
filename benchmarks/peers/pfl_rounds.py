# pyright: reportMissingImports=false
"""FedAvg in pfl-research on torch with its own central DP.

It runs in an environment of its own; `compare.py` starts it. Several workers, which divide a cohort
among them, are started by `python -m torch.distributed.run`; the first one reports for all.
"""

import importlib.metadata

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
from torch_networks import accuracy, network, tensors


class Learner(nn.Module):
    """A network with the loss and the metrics of pfl's protocol."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x):
        """Return the network's logits."""
        return self.network(x)

    def loss(self, x, y):
        """Return the mean cross-entropy of a minibatch."""
        return functional.cross_entropy(self(x), y)

    def metrics(self, x, y):
        """Return the metrics that pfl reports in the first round."""
        correct = (self(x).argmax(dim=1) == y).sum().item()
        return {"accuracy": Weighted(correct, y.numel())}


class Ticks(TrainingProcessCallback):
    """Ends of rounds."""

    def __init__(self, clock: child.Clock):
        self._clock = clock

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Note the time; pfl calls it."""
        del aggregate_metrics, model, central_iteration
        if torch.cuda.is_available():  # which runs behind
            torch.cuda.synchronize()
        self._clock.tick()
        return False, Metrics()


def training_data(workload: str, clients: child.Clients) -> FederatedDataset:
    """Make the tensors of every client once; pfl draws cohorts uniformly with replacement."""
    users = [
        PyTorchTensorDataset(tensors(workload, x, y), user_id=str(k))
        for k, (x, y) in enumerate(clients.train)
    ]
    return FederatedDataset(users.__getitem__, get_user_sampler("random", range(len(users))))


def train(args, learner: Learner, clients: child.Clients, clock: child.Clock) -> None:
    """Train, with clip and noise."""
    about = child.WORKLOADS[args.workload]
    server = torch.optim.SGD(learner.parameters(), lr=1.0)
    model = PyTorchModel(learner, torch.optim.SGD, server)
    mechanism = GaussianMechanism(child.CLIP, child.NOISE_MULTIPLIER)
    private = [CentrallyAppliedPrivacyMechanism(mechanism)]
    data = training_data(args.workload, clients)
    backend = SimulatedBackend(training_data=data, val_data=data, postprocessors=private)
    rounds = clock.warm + clock.rounds
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,  # in the first round, which is not timed, and never after
            train_cohort_size=about.cohort,
            val_cohort_size=None,
        ),
        backend,
        model,
        NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=about.learning_rate,
            local_batch_size=child.BATCH,
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Ticks(clock)],
        send_metrics_to_platform=False,
    )


def main() -> None:
    """Train, test at the end, and report."""
    args = child.parse()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002 - pfl draws cohorts and noise from the global state
    clients = child.read_clients(args.data)
    learner = Learner(network(args.workload, clients.train[0][0][0].size))
    clock = child.Clock(args.warm, args.rounds)
    train(args, learner, clients, clock)
    if get_framework_module().distributed.global_rank == 0:
        found = accuracy([learner] * len(clients.test), clients, args.workload)
        versions = {name: importlib.metadata.version(name) for name in ("pfl", "torch")}
        child.emit(clock.report(args, found, versions))


if __name__ == "__main__":
    main()
