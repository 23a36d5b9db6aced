# pyright: reportMissingImports=false
"""FedAvg on FEMNIST in FedJAX, which has no DP.

It runs in an environment of its own; `compare.py` starts it.
"""

import child
import fedjax
import fedjax_rounds
import haiku as hk
import jax


def cnn(x):
    """The papers' network."""
    x = x.reshape((-1, child.SIDE, child.SIDE, 1))
    for features in (32, 64):
        x = hk.Conv2D(features, 5, padding="VALID")(x)
        x = jax.nn.relu(hk.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"))
    return hk.Linear(child.CLASSES)(x.reshape((x.shape[0], -1)))


def make_model(clients: child.Clients) -> fedjax.Model:
    x, y = clients.train[0]
    return fedjax.create_model_from_haiku(
        transformed_forward_pass=hk.transform(lambda batch: cnn(batch["x"])),
        sample_batch={"x": x[:1], "y": y[:1]},
        train_loss=lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(
            batch["y"], logits
        ),
        eval_metrics={"accuracy": fedjax.metrics.Accuracy()},
    )


def main() -> None:
    args = child.parse()
    child.emit(fedjax_rounds.measure(args, make_model, child.COHORT, "accuracy", 256))


if __name__ == "__main__":
    main()
