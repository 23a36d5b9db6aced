# pyright: reportMissingImports=false
"""FedAvg of FedJAX's own character model: two LSTM layers of 256 units.

It runs in an environment of its own; `compare.py` starts it. The model is
`fedjax.models.shakespeare.create_lstm_model` as it comes along, but for one name: it asks for
`jax.numpy.NINF`, which the JAX that FedJAX 0.0.17 runs on no longer has.
"""

import importlib.metadata
import time

import child
import jax.numpy as jnp

setattr(jnp, "NINF", -jnp.inf)  # noqa: B010
import fedjax  # noqa: E402
import jax  # noqa: E402

OTHERS = 4
"""Tokens that FedJAX's model has besides its vocabulary."""


def main() -> None:
    args = child.parse()
    fedjax.set_for_each_client_backend(args.setting.partition(",")[0])
    clients = child.read_clients(args.data)
    data = fedjax.InMemoryFederatedData(
        {str(k): {"x": x.astype("int32"), "y": y} for k, (x, y) in enumerate(clients.train)}
    )
    model = fedjax.models.shakespeare.create_lstm_model(
        child.CHARACTERS - OTHERS, child.EMBEDDING, child.UNITS, child.LAYERS
    )
    batches = fedjax.ShuffleRepeatBatchHParams(child.BATCH, num_epochs=1, seed=args.seed)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(child.LEARNING_RATE),
        fedjax.optimizers.sgd(1.0),
        batches,
    )
    cohort = child.TEXT_COHORT
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, cohort, args.seed)
    state = algorithm.init(model.init(jax.random.PRNGKey(args.seed)))
    parameters = sum(leaf.size for leaf in jax.tree_util.tree_leaves(state.params))
    times = [time.perf_counter()]
    for _ in range(args.warm + args.rounds):
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        times.append(time.perf_counter())
    x, y = clients.all_tests()
    test = fedjax.ClientDataset({"x": x.astype("int32"), "y": y}).padded_batch(batch_size=40)
    loss = float(fedjax.evaluate_model(model, state.params, test)["token_loss"])
    start = times[args.warm]
    versions = {name: importlib.metadata.version(name) for name in ("fedjax", "jax", "jaxlib")}
    told = child.report(args, times[-1] - start, start - times[0], {"loss": loss}, versions)
    child.emit(told | {"parameters": parameters})


if __name__ == "__main__":
    main()
