# pyright: reportMissingImports=false
"""FedAvg of FedJAX's own character model: two LSTM layers of 256 units.

It runs in an environment of its own; `compare.py` starts it. The model is
`fedjax.models.shakespeare.create_lstm_model` as it comes along, but for one name: it asks for
`jax.numpy.NINF`, which the JAX that FedJAX 0.0.17 runs on no longer has.
"""

import child
import jax.numpy as jnp

setattr(jnp, "NINF", -jnp.inf)  # noqa: B010
import fedjax  # noqa: E402
import fedjax_rounds  # noqa: E402

OTHERS = 4
"""Tokens that FedJAX's model has besides its vocabulary."""


def make_model(clients: child.Clients) -> fedjax.Model:
    """The model, whoever the clients are."""
    del clients
    return fedjax.models.shakespeare.create_lstm_model(
        child.CHARACTERS - OTHERS, child.EMBEDDING, child.UNITS, child.LAYERS
    )


def main() -> None:
    told = fedjax_rounds.measure(
        child.parse(),
        make_model,
        child.TEXT_COHORT,
        "token_loss",
        40,
        inputs=lambda x: x.astype("int32"),
    )
    child.emit(told)


if __name__ == "__main__":
    main()
