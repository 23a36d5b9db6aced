# pyright: reportMissingImports=false
"""FedAvg on FEMNIST in FedJAX, which has no DP.

It runs in an environment of its own; `compare.py` starts it. The setting begins with the backend of
`fedjax.for_each_client`: "jit" takes one client after the other, "pmap" one per device.
"""

import importlib.metadata
import time

import child
import fedjax
import haiku as hk
import jax


def cnn(x):
    """Apply the papers' network."""
    x = x.reshape((-1, child.SIDE, child.SIDE, 1))
    for features in (32, 64):
        x = hk.Conv2D(features, 5, padding="VALID")(x)
        x = jax.nn.relu(hk.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"))
    return hk.Linear(child.CLASSES)(x.reshape((x.shape[0], -1)))


def main() -> None:
    """Train, test at the end, and report."""
    args = child.parse()
    fedjax.set_for_each_client_backend(args.setting.partition(",")[0])
    clients = child.read_clients(args.data)
    data = fedjax.InMemoryFederatedData(
        {str(k): {"x": x, "y": y} for k, (x, y) in enumerate(clients.train)}
    )
    x, y = clients.train[0]
    model = fedjax.create_model_from_haiku(
        transformed_forward_pass=hk.transform(lambda batch: cnn(batch["x"])),
        sample_batch={"x": x[:1], "y": y[:1]},
        train_loss=lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(
            batch["y"], logits
        ),
        eval_metrics={"accuracy": fedjax.metrics.Accuracy()},
    )
    # The last batch of an epoch is filled up with more of the client's rows.
    batches = fedjax.ShuffleRepeatBatchHParams(child.BATCH, num_epochs=1, seed=args.seed)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(child.LEARNING_RATE),
        fedjax.optimizers.sgd(1.0),
        batches,
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, child.COHORT, args.seed)
    state = algorithm.init(model.init(jax.random.PRNGKey(args.seed)))
    times = [time.perf_counter()]
    for _ in range(args.warm + args.rounds):
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        times.append(time.perf_counter())
    x, y = clients.all_tests()
    test = fedjax.ClientDataset({"x": x, "y": y}).padded_batch(batch_size=256)
    accuracy = float(fedjax.evaluate_model(model, state.params, test)["accuracy"])
    versions = {name: importlib.metadata.version(name) for name in ("fedjax", "jax", "jaxlib")}
    child.emit(child.report(args, times, accuracy, versions))


if __name__ == "__main__":
    main()
