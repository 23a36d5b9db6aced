# pyright: reportMissingImports=false
"""FedAvg and Ditto in PFLlib, without DP: a checkout, whose `system` folder is PFLLIB.

It runs in an environment of its own; `compare.py` starts it. PFLlib reads a client's file at the
start of each of its epochs; the setting "rows in memory" keeps what was read. It drops a last
minibatch that is not full, and so does up to a third less than the others.
"""

import contextlib
import functools
import importlib
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import child
import numpy as np
import torch
from torch_networks import accuracy, network


class Ends(list):
    """Seconds of rounds, which PFLlib appends at the end of each."""

    def __init__(self, clock: child.Clock):
        super().__init__()
        self._clock = clock

    def append(self, value) -> None:
        """Note the end of a round."""
        super().append(value)
        self._clock.tick()


def write(clients: child.Clients, folder: Path) -> None:
    """Write the files of PFLlib's data folder, one for each client and split."""
    for name, split in (("train", clients.train), ("test", clients.test)):
        (folder / name).mkdir(parents=True)
        for k, (x, y) in enumerate(split):
            # PFLlib takes a row of symbols for a sequence if its data set is called Shakespeare.
            rows = {"x": x if x.dtype.kind in "iu" else x.reshape(len(x), -1), "y": y}
            np.savez(folder / name / f"{k}.npz", data=np.array(rows, dtype=object))


def arguments(args, clients: child.Clients, name: str) -> SimpleNamespace:
    """Return what PFLlib's command line would give."""
    about, size = child.WORKLOADS[args.workload], len(clients.train)
    return SimpleNamespace(
        device="cpu", dataset=name, num_classes=about.classes, algorithm=args.system,
        model=network(args.workload, clients.train[0][0][0].size),
        global_rounds=args.warm + args.rounds - 1, local_epochs=1, plocal_epochs=1,
        batch_size=child.BATCH, local_learning_rate=about.learning_rate, mu=child.LAM,
        learning_rate_decay=False, learning_rate_decay_gamma=1.0,
        num_clients=size, join_ratio=about.cohort / size + 1e-9, random_join_ratio=False,
        few_shot=0, time_select=False, goal="speed", time_threthold=10_000,
        save_folder_name="items", top_cnt=100, auto_break=False, eval_gap=10**9,
        client_drop_rate=0.0, train_slow_rate=0.0, send_slow_rate=0.0, dlg_eval=False,
        dlg_gap=100, batch_num_per_client=2, num_new_clients=0, fine_tuning_epoch_new=0,
    )  # fmt: skip


def main() -> None:
    """Train, test at the end, and report."""
    args = child.parse()
    clients = child.read_clients(args.data)
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002 - PFLlib draws cohorts from the global state
    sys.path.insert(0, os.environ["PFLLIB"])
    name = "Shakespeare" if args.workload == "gru" else "rows"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        write(clients, Path(folder) / "dataset" / name)
        (Path(folder) / "system").mkdir()
        os.chdir(Path(folder) / "system")  # PFLlib reads ../dataset
        personal = args.system == "ditto"
        module = importlib.import_module(f"flcore.servers.server{'ditto' if personal else 'avg'}")
        if args.setting.startswith("rows in memory"):
            for user in ("clients.clientbase", "servers.serverbase"):
                reader: Any = importlib.import_module(f"flcore.{user}")
                reader.read_client_data = functools.cache(reader.read_client_data)
        server = (module.Ditto if personal else module.FedAvg)(arguments(args, clients, name), 0)
        clock = child.Clock(args.warm, args.rounds)
        server.Budget = Ends(clock)
        # Neither evaluations, one of which is before the first round, nor files of results.
        server.evaluate = server.evaluate_personalized = lambda: None
        server.save_results = server.save_global_model = lambda: None
        server.rs_test_acc = [0.0]
        server.train()
        os.chdir("/")
    own = [server.global_model] * len(clients.train)
    if personal:
        own = [one.model_per for one in server.clients]
    found = accuracy(own, clients, args.workload)
    child.emit(clock.report(args, found, {"PFLlib": "main", "torch": torch.__version__}))


if __name__ == "__main__":
    main()
