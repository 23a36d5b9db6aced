# pyright: reportMissingImports=false
"""FedAvg in FedJAX, which has no DP.

It runs in an environment of its own; `compare.py` starts it. The setting begins with the backend of
`fedjax.for_each_client`: "jit" takes one client after the other, "pmap" one per device.
"""

import importlib.metadata

import child
import fedjax
import haiku as hk
import jax


def logits(workload: str, x):
    """Apply the network of a workload."""
    about = child.WORKLOADS[workload]
    if workload == "gru":
        embedded = hk.Embed(about.classes, about.width)(x)
        units = hk.GRU(about.width)
        start = units.initial_state(x.shape[0])
        states, _ = hk.dynamic_unroll(units, embedded, start, time_major=False)
        return hk.Linear(about.classes)(states)
    if workload == "cnn":
        x = x.reshape((-1, 28, 28, 1))
        for features in (32, 64):
            x = hk.Conv2D(features, 5, padding="VALID")(x)
            x = jax.nn.relu(hk.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"))
    x = x.reshape((x.shape[0], -1))
    if workload == "mlp":
        x = jax.nn.relu(hk.Linear(about.width)(x))
    return hk.Linear(about.classes)(x)


def loss(batch, logits):
    """Return the cross-entropy of each example, of sequences the mean over positions."""
    each = fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits)
    return each.reshape((each.shape[0], -1)).mean(axis=1)


def main() -> None:
    """Train, test at the end, and report."""
    args = child.parse()
    about, clock = child.WORKLOADS[args.workload], child.Clock(args.warm, args.rounds)
    jax.__dict__["tree_map"] = jax.tree.map  # FedJAX calls it, and today's JAX has it no longer
    fedjax.set_for_each_client_backend(args.setting.partition(",")[0])
    clients = child.read_clients(args.data)
    data = fedjax.InMemoryFederatedData(
        {str(k): {"x": x, "y": y} for k, (x, y) in enumerate(clients.train)}
    )
    x, y = clients.train[0]
    model = fedjax.create_model_from_haiku(
        transformed_forward_pass=hk.transform(lambda batch: logits(args.workload, batch["x"])),
        sample_batch={"x": x[:1], "y": y[:1]},
        train_loss=loss,
        eval_metrics={},
    )
    # The last batch of an epoch is filled up with more of the client's rows.
    batches = fedjax.ShuffleRepeatBatchHParams(child.BATCH, num_epochs=1, seed=args.seed)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(about.learning_rate),
        fedjax.optimizers.sgd(1.0),
        batches,
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, about.cohort, args.seed)
    state = algorithm.init(model.init(jax.random.PRNGKey(args.seed)))
    for _ in range(args.warm + args.rounds):
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        clock.tick()
    x, y = clients.all_tests()
    said = model.apply_for_eval(state.params, {"x": x, "y": y}).argmax(axis=-1)
    versions = {name: importlib.metadata.version(name) for name in ("fedjax", "jax", "jaxlib")}
    child.emit(clock.report(args, float((said == y).mean()), versions))


if __name__ == "__main__":
    main()
