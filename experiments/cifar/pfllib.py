# pyright: reportMissingImports=false
"""PFLlib's code on the rows, the split and the first models of small.py, without noise.

    python experiments/cifar/pfllib.py CHECKOUT ROWS FILE [SYSTEM ...]

CHECKOUT is a checkout of TsingZ0/PFLlib; torch, h5py and scikit-learn have to be installed. ROWS
is the file that small.py reads. FILE gets a line for each seed, protocol and system (all by
default), and a further call goes on after the last one. Minibatches, learning rate, rounds and
weights of penalties are those of small.py; what we lack are the defaults of their command. Replaced
are their reading of files and their seed, which is 0 for each client. Protocols are

  ours: with the changes in `Ours`, the first of which is that clients train on all their rows;
  theirs: with the change in `Theirs`.
"""

import contextlib
import csv
import importlib
import itertools
import random
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional

import fedjaxsim as fjs

sys.path.insert(0, str(Path(__file__).parent))
import small
from cifar import CLASSES, GROUPS, resnet8
from small import BATCH, CLIENTS, HEAD, RATE, ROUNDS, SEEDS, split_rows

SERVERS = {
    "FedAvg": "serveravg.FedAvg", "FedPer": "serverper.FedPer", "Local": "serverlocal.Local",
    "Ditto": "serverditto.Ditto", "APFL": "serverapfl.APFL", "FedRep": "serverrep.FedRep",
    "FedALA": "serverala.FedALA", "Per-FedAvg": "serverperavg.PerAvg",
    "FedProx": "serverprox.FedProx",
}  # fmt: skip
"""The module and the class of each system's server."""
TESTS = {"Ditto": "evaluate_personalized", "Per-FedAvg": "evaluate_one_step"}
"""The server's method that tests personal models, if it is not `evaluate`."""
Rows = list[tuple[torch.Tensor, torch.Tensor]]


# --- the model ------------------------------------------------------------------------------------


class Convolution(torch.nn.Module):
    """A convolution and GroupNorm, from flax's parameters."""

    def __init__(self, params: dict[str, Any], stride: int):
        super().__init__()
        kernel, norm = np.asarray(params["kernel"]), params["GroupNorm_0"]
        first = torch.tensor(kernel.transpose(3, 2, 0, 1)).contiguous()  # as APFL needs it
        self.kernel = torch.nn.Parameter(first)
        self.scale = torch.nn.Parameter(torch.tensor(np.asarray(norm["scale"])))
        self.bias = torch.nn.Parameter(torch.tensor(np.asarray(norm["bias"])))
        self.stride, self.border = stride, kernel.shape[0] // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized outputs, (b, channels, height, width)."""
        x = functional.conv2d(x, self.kernel, stride=self.stride, padding=self.border)
        return functional.group_norm(x, GROUPS, self.scale, self.bias, eps=1e-6)


class ResNet(torch.nn.Module):
    """ResNet-8 of cifar.py with the same parameters; `fc` is the output layer, as they call it."""

    def __init__(self, params: dict[str, Any]):
        super().__init__()
        strides = (1, 1, 1, 2, 1, 2, 2, 1, 2)
        parts = [Convolution(params[f"_Convolution_{i}"], s) for i, s in enumerate(strides)]
        self.parts = torch.nn.ModuleList(parts)
        kernel, bias = (torch.tensor(np.asarray(params[HEAD][n])) for n in ("kernel", "bias"))
        self.fc: torch.nn.Module = torch.nn.Linear(*kernel.shape)
        self.fc.load_state_dict({"weight": kernel.T, "bias": bias})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (b, classes) of images (b, channels, height, width)."""
        first, *others = self.parts
        x = torch.relu(first(2 * x - 1))
        for place, skip in enumerate((None, others[4], others[7])):
            a, b = others[(0, 2, 5)[place] :][:2]
            x = torch.relu(b(torch.relu(a(x))) + (x if skip is None else skip(x)))
        return self.fc(x.mean(dim=(2, 3)))


# --- their library --------------------------------------------------------------------------------


class Theirs:
    """Their protocol, in which a client trains on full minibatches only, and counts by its rows.

    Changed is that Per-FedAvg adapts with fewer rows than 10, too, where theirs stops.
    """

    settings: Mapping[str, Any] = {}
    sends_before_test = True

    def __init__(self, name: str):
        self.name = name

    def loader(self, rows: Rows, size: int, drop_last: bool, shuffle: bool = False) -> Any:
        """Return the minibatches of a pass."""
        if self.name == "Per-FedAvg" and len(rows) < size == BATCH:
            drop_last = False
        return torch.utils.data.DataLoader(rows, size, drop_last=drop_last, shuffle=shuffle)

    def change(self, server: Any) -> None:
        """Change a server before it trains."""


class Ours(Theirs):
    """Our protocol, in which a client trains on all its rows, and all clients count equally.

    Per-FedAvg halves minibatches of 10, where theirs have two of 10, trains once a round, where
    theirs trains twice, and adapts its predictions with all training rows, where theirs takes a
    minibatch. FedALA mixes all layers, where theirs mixes the last one, by one pass over all rows
    in each round, and clients predict with what they trained, where theirs predict with mixtures.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.sends_before_test = name != "FedALA"
        if name == "Per-FedAvg":
            self.settings = {"batch_size": BATCH // 2}
        if name == "FedALA":
            self.settings = {"layer_idx": 0, "rand_percent": 100}

    def loader(self, rows: Rows, size: int, drop_last: bool, shuffle: bool = False) -> Any:
        """Return the minibatches of a pass."""
        if self.name == "Per-FedAvg" and drop_last and size < BATCH:
            size = len(rows)
        batches = torch.utils.data.DataLoader(rows, size, shuffle=shuffle)
        if self.name == "Per-FedAvg" and size == BATCH:
            return [batch for batch in batches if len(batch[1]) > BATCH // 2]
        return batches

    def change(self, server: Any) -> None:
        """Change a server before it trains."""
        for client in server.clients:
            client.train_samples = 1
            if self.name == "FedALA":
                client.ALA.threshold, client.ALA.num_pre_loss = np.inf, 0
            if self.name == "Per-FedAvg":
                client.train = every_second(client.train)


def every_second(call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `call` in its first, third, fifth call."""
    count = iter(range(10**9))
    return lambda: call() if next(count) % 2 == 0 else None


PROTOCOLS = {"ours": Ours, "theirs": Theirs}


class PFLlib:
    """Their library, on the rows of a population."""

    def __init__(self, checkout: Path, clients: fjs.Population):
        sys.path.insert(0, str(checkout / "system"))
        self.rows = {split: tensors(clients, split) for split in ("train", "test")}
        stub("utils.dlg", DLG=None)
        stub("utils.data_utils", read_client_data=self.read)
        self.client: Any = importlib.import_module("flcore.clients.clientbase")
        self.models: Any = importlib.import_module("flcore.trainmodel.models")

    def read(self, dataset: str, k: int, is_train: bool, few_shot: int) -> Rows:
        """Return the rows of a client."""
        del dataset, few_shot
        return self.rows["train" if is_train else "test"][k]

    def accuracy(self, name: str, params: dict[str, Any], seed: int, protocol: str) -> float:
        """Train a system; return its accuracy on all test rows after the last round."""
        model: Any = ResNet(params)
        if name in ("FedAvg", "FedPer", "FedRep"):  # as their main.py does
            head, model.fc = model.fc, torch.nn.Identity()
            model = self.models.BaseHeadSplit(model, head)
        off = (
            "random_join_ratio few_shot learning_rate_decay auto_break dlg_eval client_drop_rate "
            "train_slow_rate send_slow_rate num_new_clients algorithm dataset save_folder_name "
            "time_select goal top_cnt dlg_gap batch_num_per_client fine_tuning_epoch_new"
        )
        settings: dict[str, Any] = {
            **dict.fromkeys(off.split(), 0), "model": model, "device": "cpu",
            "num_classes": CLASSES, "batch_size": BATCH, "local_learning_rate": RATE,
            "local_epochs": 1, "plocal_epochs": 1, "learning_rate_decay_gamma": 1.0,
            "global_rounds": ROUNDS - 1, "num_clients": CLIENTS, "join_ratio": 1.0,
            "time_threthold": 1e9, "eval_gap": 1,
            # The weights of our defaults, and the defaults of their command.
            "mu": 0.1, "alpha": 0.5, "eta": 1.0, "rand_percent": 80, "layer_idx": 2,
        }  # fmt: skip
        changes = PROTOCOLS[protocol](name)
        settings |= changes.settings
        self.client.DataLoader = changes.loader
        module, kind = SERVERS[name].split(".")
        with contextlib.redirect_stdout(None), torch.backends.mkldnn.flags(enabled=False):
            make = getattr(importlib.import_module(f"flcore.servers.{module}"), kind)
            server = make(SimpleNamespace(**settings), 0)
            test = getattr(server, TESTS.get(name, "evaluate"))
            for other in ("evaluate", *TESTS.values()):
                setattr(server, other, lambda: None)
            server.save_results = server.save_global_model = lambda: None
            server.rs_test_acc = [0.0]
            changes.change(server)
            torch.manual_seed(seed)
            np.random.seed(seed)  # noqa: NPY002 - theirs
            random.seed(seed)
            server.train()
            if changes.sends_before_test and name != "Local":
                server.send_models()
            test()
        return server.rs_test_acc[-1]


def tensors(clients: fjs.Population, split: str) -> list[Rows]:
    """Return each client's pairs of an image (channels, height, width) and its label."""
    return [
        list(zip(torch.tensor(x.transpose(0, 3, 1, 2)), torch.tensor(y).long(), strict=True))
        for x, y in split_rows(clients, split)
    ]


def stub(name: str, **attributes: Any) -> None:
    """Put a module in the place of theirs."""
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(attributes)


def main(checkout: Path, rows: Path, file: Path, names: Sequence[str]) -> None:
    """Write the results that the file lacks."""
    if not file.exists():
        file.write_text("system,protocol,seed,test_accuracy\n")
    with file.open(newline="") as stream:
        done = {(row["system"], row["protocol"], row["seed"]) for row in csv.DictReader(stream)}
    clients, model = small.population(rows), resnet8((8, 8, 1), CLASSES, width=8, native=True)
    sim = small.simulation("FedAvg", clients, model)
    hparams = small.without_noise("FedAvg", sim)
    starts = [sim.init(seed, hparams).shared.params for seed in SEEDS]
    images = split_rows(clients, "test")[0][0]
    theirs = ResNet(starts[0])(torch.tensor(images.transpose(0, 3, 1, 2))).detach().numpy()
    np.testing.assert_allclose(theirs, model.apply(starts[0], jnp.asarray(images)), atol=1e-4)

    torch.set_num_threads(1)
    library = PFLlib(checkout, clients)
    for seed, protocol, name in itertools.product(SEEDS, PROTOCOLS, names):
        if (name, protocol, str(seed)) not in done:
            accuracy = library.accuracy(name, starts[seed], seed, protocol)
            with file.open("a", newline="") as stream:
                row = [name, protocol, seed, round(accuracy, 5)]
                csv.writer(stream, lineterminator="\n").writerow(row)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("usage: pfllib.py CHECKOUT ROWS FILE [SYSTEM ...]")
    checkout, rows, file = map(Path, sys.argv[1:4])
    main(checkout, rows, file, sys.argv[4:] or [*SERVERS])
