# pyright: reportMissingImports=false
"""FedAvg in FedJAX, which has no DP: what its runs share, whatever the model.

The setting begins with the backend of `fedjax.for_each_client`: "jit" takes one client after the
other, "pmap" one per device.
"""

import argparse
import importlib.metadata
import time
from collections.abc import Callable
from typing import Any

import child
import fedjax
import jax
import numpy as np


def measure(
    args: argparse.Namespace,
    make_model: Callable[[child.Clients], Any],
    cohort: int,
    metric: str,
    test_batch: int,
    inputs: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> dict[str, Any]:
    """Trains, and tests at the end.

    Args:
      args: as `child.parse` gives them.
      make_model: of the clients.
      cohort: clients in a round.
      metric: one of the model's.
      test_batch: rows that are tested at once.
      inputs: what the model takes of examples.

    Returns:
      The report, with `metric` under the last of its words, and the number of parameters.
    """
    fedjax.set_for_each_client_backend(args.setting.partition(",")[0])
    clients = child.read_clients(args.data)
    data = fedjax.InMemoryFederatedData(
        {str(k): {"x": inputs(x), "y": y} for k, (x, y) in enumerate(clients.train)}
    )
    model = make_model(clients)
    # The last batch of an epoch is filled up with more of the client's rows.
    batches = fedjax.ShuffleRepeatBatchHParams(child.BATCH, num_epochs=1, seed=args.seed)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(child.LEARNING_RATE),
        fedjax.optimizers.sgd(1.0),
        batches,
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, cohort, args.seed)
    state = algorithm.init(model.init(jax.random.PRNGKey(args.seed)))
    parameters = sum(leaf.size for leaf in jax.tree_util.tree_leaves(state.params))
    times = [time.perf_counter()]
    for _ in range(args.warm + args.rounds):
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        times.append(time.perf_counter())
    x, y = clients.all_tests()
    test = fedjax.ClientDataset({"x": inputs(x), "y": y}).padded_batch(batch_size=test_batch)
    learned = float(fedjax.evaluate_model(model, state.params, test)[metric])
    start = times[args.warm]
    versions = {name: importlib.metadata.version(name) for name in ("fedjax", "jax", "jaxlib")}
    name = metric.rpartition("_")[2]
    told = child.report(args, times[-1] - start, start - times[0], {name: learned}, versions)
    return told | {"parameters": parameters}
