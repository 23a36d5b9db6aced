# pyright: reportMissingImports=false
"""The networks of the workloads in torch, for pfl, Flower, fluke and PFLlib."""

import math
from collections.abc import Sequence

import child
import numpy as np
import torch
from torch import nn


class GRU(nn.Module):
    """Embedding, gated recurrent units, and logits of the next symbol at every position."""

    def __init__(self, symbols: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.units = nn.GRU(width, width, batch_first=True)
        self.output = nn.Linear(width, symbols)

    def forward(self, x):
        """Return logits (b, symbols, L) of symbols (b, L), as torch's cross-entropy takes them."""
        return self.output(self.units(self.embedding(x))[0]).transpose(1, 2)


def network(workload: str, features: int) -> nn.Module:
    """Return the network of a workload; but for the GRU it starts as those of JAX do."""
    about = child.WORKLOADS[workload]
    if workload == "gru":
        return GRU(about.classes, about.width)
    if workload == "cnn":
        layers = (
            nn.Unflatten(1, (1, 28, 28)),
            nn.Conv2d(1, 32, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Flatten(), nn.Linear(1024, about.classes),
        )  # fmt: skip
    elif workload == "mlp":
        hidden, output = nn.Linear(features, about.width), nn.Linear(about.width, about.classes)
        layers = hidden, nn.ReLU(), output
    else:
        layers = (nn.Linear(features, about.classes),)
    made = nn.Sequential(*layers)
    for parameter in made.parameters():
        if parameter.ndim == 1 or workload == "softmax":
            nn.init.zeros_(parameter)
        else:  # LeCun's
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter[0].numel()))
    return made


def tensors(workload: str, x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (n, features), or (n, L) symbols, and labels, (n,) or (n, L)."""
    inputs = x.astype(np.int64) if workload == "gru" else x.reshape(len(x), -1)
    return torch.from_numpy(inputs), torch.from_numpy(y.astype(np.int64))


def right(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return whether the network says each label, as 0 or 1."""
    network.eval()
    device = next(network.parameters()).device
    with torch.no_grad():
        parts = zip(x.to(device).split(500), y.to(device).split(500), strict=True)
        return torch.cat([(network(a).argmax(dim=1) == b).double().flatten() for a, b in parts])


def accuracy(networks: Sequence[nn.Module], clients: child.Clients, workload: str) -> float:
    """Return the share of right labels in all test rows, of each client by its own network."""
    pairs = zip(networks, clients.test, strict=True)
    return torch.cat([right(net, *tensors(workload, *rows)) for net, rows in pairs]).mean().item()
