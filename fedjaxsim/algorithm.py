"""What an algorithm is: four functions written for ONE client.

Every system here is an instance of the billboard model. A server publishes `shared`, which
everybody may read; each client keeps `personal`, which nobody else may read; in a round some
clients compute a message; the messages reach the server only through the mechanism, which clips,
sums and noises them; and the server writes the next `shared` from that release and from nothing
else. No algorithm knows that there is a client axis: the engine maps `client` over it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import optax

from fedjaxsim.hparams import Hyperparameters

PyTree = Any
Metrics = dict[str, jax.Array]
LocalOptimizer = Callable[[Hyperparameters, jax.Array], optax.GradientTransformation]
"""(hparams, round) -> the optimizer of a client's local steps in that round."""
ServerOptimizer = Callable[[Hyperparameters], optax.GradientTransformation]
"""hparams -> the optimizer with which the server applies the release."""


class Context(NamedTuple):
    """What a client knows of the round besides its data.

    Attributes:
      round: () int32, counted from 0.
      key: a random key that belongs to this client and this round.
      client_id: () int32 in [0, m).
      num_clients: m, public.
    """

    round: jax.Array
    key: jax.Array
    client_id: jax.Array
    num_clients: int


class Client(Protocol):
    """One client's round, as in `Algorithm`; `data` is its `ClientData`."""

    def __call__(  # noqa: D102
        self,
        shared: PyTree,
        personal: PyTree,
        data: Any,
        hparams: Hyperparameters,
        context: Context,
        /,
    ) -> tuple[PyTree, PyTree, Metrics]: ...


class Algorithm(NamedTuple):
    """A federated algorithm, for one client.

    Attributes:
      init: `(key, hparams) -> (shared, personal)`: the first billboard and ONE client's personal
        state; neither may depend on private data.
      client: `(shared, personal, data, hparams, context) -> (personal, message, metrics)`: one
        client's round. `data` is its `ClientData`; `message` is a pytree of float arrays, or `()`
        where nothing is sent; `metrics` are scalars for the researcher, never read by the server.
      server: `(shared, release, hparams, round) -> shared`: the next billboard.
      predict: `(shared, personal, hparams, client_id) -> params`: what the client predicts with.
      check: `(hparams)`: raises ValueError where hyperparameters, as far as they are known on the
        host, do not suit the algorithm.
      published: `(shared) -> params`: the parameters on the billboard with which another algorithm
        may start, or None where there are none.
      start: `(hparams, published, own) -> (shared, personal)`: as `init`, from what an earlier run
        left: the parameters that it published, and those that ONE client predicted with. The
        billboard may depend on the published ones only. None where it starts from `init` alone.
      needs_published: whether `start` is refused where the earlier run published no parameters;
        otherwise those of the task's `init` stand in.
      public: sentences on numbers that may be made of private data but are taken as public, such as
        the server's divisor; a guarantee names them among its assumptions.
    """

    init: Callable[[jax.Array, Hyperparameters], tuple[PyTree, PyTree]]
    client: Client
    server: Callable[[PyTree, PyTree, Hyperparameters, jax.Array], PyTree]
    predict: Callable[[PyTree, PyTree, Hyperparameters, jax.Array], PyTree]
    check: Callable[[Hyperparameters], None] = lambda hparams: None
    public: tuple[str, ...] = ()
    published: Callable[[PyTree], PyTree | None] = lambda shared: None
    start: Callable[..., tuple[PyTree, PyTree]] | None = None
    needs_published: bool = False
