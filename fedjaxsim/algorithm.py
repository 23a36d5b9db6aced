"""An algorithm: `init`, `client` and `predict` for ONE client, and `server`.

Every system here is an instance of the billboard model. A server publishes `shared`, which
everybody may read; each client keeps `personal`, which nobody else may read; in a round some
clients compute a message; the messages reach the server only through the mechanism, which clips,
sums and noises them; and the server writes the next `shared` from that release and from nothing
else. No algorithm knows that there is a client axis: the engine maps `client` over it.
"""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import optax
from jax import dtypes

from fedjaxsim.data.minibatches import ClientData
from fedjaxsim.factories import made_by, maker
from fedjaxsim.hyperparameters import (
    Declarations,
    HyperparameterCheck,
    Hyperparameters,
    defaults_in_words,
)
from fedjaxsim.tasks.task import Task

PyTree = Any
Metrics = dict[str, jax.Array]


class Context(NamedTuple):
    """Client's knowledge of the round besides its data.

    Attributes:
      round: () int32, counted from 0.
      key: a random key that belongs to this client and this round.
      client_id: () int32 in [0, m).
      num_clients: m, public.
      sampling_rate: () float, the probability p with which each client is drawn and, where clients
        do not always answer, answers; public.

    Example:
      >>> context = fjs.Context(0, jax.random.key(0), 3, num_clients=10, sampling_rate=0.5)
      >>> context.client_id
      3
    """

    round: jax.Array
    key: jax.Array
    client_id: jax.Array
    num_clients: int
    sampling_rate: jax.Array


class Init(Protocol):
    """The first states."""

    # With both of the last ones of any type, checkers of types take functions with and without.
    def __call__(
        self, key: jax.Array, hparams: Hyperparameters, /, *fields: Any, **_: Any
    ) -> tuple[PyTree, PyTree]:
        """Return the first server state and ONE client's first personal state.

        Neither may depend on private data, nor the server's on a client's hyperparameters.

        Args:
          key: a random key, the same for all clients.
          hparams: as for a client.
          *fields: for a function with a third argument, a dict of the shapes and types of a
            client's fields with one row, each (1, ...).
          **_: nothing.
        """
        ...


class Start(Protocol):
    """The first states of a stage that follows a stage of another algorithm."""

    def __call__(
        self, key: jax.Array, hparams: Hyperparameters, published: PyTree, own_model: PyTree, /
    ) -> tuple[PyTree, PyTree]:
        """Return the server state and ONE client's personal state, as `Init`.

        Args:
          key: a random key, the same for all clients.
          hparams: as for a client.
          published: the parameters that the earlier stage published.
          own_model: the parameters that the client predicted with.
        """
        ...


class Client(Protocol):
    """One client's round."""

    def __call__(
        self,
        shared: PyTree,
        personal: PyTree,
        data: ClientData,
        hparams: Hyperparameters,
        context: Context,
        /,
    ) -> tuple[PyTree, PyTree, Metrics]:
        """Return the client's next personal state, its message and its metrics.

        Args:
          shared: the server state.
          personal: the client's own state.
          data: its view of its training rows, whose `fold` takes the local steps.
          hparams: the declared hyperparameters, () each or (T,); of one per client, its own.
          context: round, keys and public numbers.

        Returns:
          The personal state, of the structure, shapes and types of `personal`; the message, a
          pytree of float arrays, or `()` if nothing is sent; metrics, a dict of scalars for the
          researcher, which the server never reads.
        """
        ...


class Server(Protocol):
    """The server's step, which reads the release alone."""

    def __call__(
        self, shared: PyTree, release: PyTree, hparams: Hyperparameters, round_: jax.Array, /
    ) -> PyTree:
        """Return the next server state, like `shared`.

        Args:
          shared: the server state.
          release: the output of the mechanism, by default the noised sum of clipped messages over
            their expected number; like a message.
          hparams: as for a client, but for those with a value for each client, which are hidden;
            `hparams.sampling_rate` is the rate p of any sampler.
          round_: () int32, counted from 0.
        """
        ...


class Predict(Protocol):
    """A client's model, from states alone."""

    def __call__(
        self, shared: PyTree, personal: PyTree, hparams: Hyperparameters, client_id: jax.Array, /
    ) -> PyTree:
        """Return the parameters that the client predicts with, as the task takes them."""
        ...


class PredictWithData(Protocol):
    """A client's model, from its training rows, too."""

    def __call__(
        self,
        shared: PyTree,
        personal: PyTree,
        data: ClientData,
        hparams: Hyperparameters,
        client_id: jax.Array,
        /,
    ) -> PyTree:
        """Return the parameters that the client predicts with, made of its training rows."""
        ...


class LocalOptimizer(Protocol):
    """The optimizer of a client's local steps."""

    def __call__(
        self, hparams: Hyperparameters, round_: jax.Array, /
    ) -> optax.GradientTransformation:
        """Return the optimizer of a round, () int32, counted from 0."""
        ...


class ServerOptimizer(Protocol):
    """The optimizer with which the server applies the release."""

    def __call__(self, hparams: Hyperparameters, /) -> optax.GradientTransformation:
        """Return the optimizer; its state is a part of the server state."""
        ...


class Curvature(Protocol):
    """The curvature of what a local step descends."""

    def __call__(self, of_loss: float, hparams: Hyperparameters, /) -> Any:
        """Return L, (), of all that a step with η descends, from L of the loss."""
        ...


class TypicalMessage(Protocol):
    """The default clip norm of private runs."""

    def __call__(self, of_loss: float, /) -> float:
        """Return C from the curvature L of the loss on bounded rows."""
        ...


class ExampleEpsilon(Protocol):
    """The cost of a client's own noise to its examples."""

    def __call__(self, hparams: Hyperparameters, /) -> jax.Array:
        """Return ε, (), at which one message is private for each of the client's examples."""
        ...


class PersonalPull(Protocol):
    """The penalty that a client's personal state descends besides its loss."""

    def __call__(
        self,
        shared: PyTree,
        personal: PyTree,
        data: ClientData,
        hparams: Hyperparameters,
        client_id: jax.Array,
        /,
    ) -> Any:
        """Return the `Pull` of the client's round; the arguments are as `Client` has them."""
        ...


class AtWork(Protocol):
    """The asynchrony of rounds."""

    def __call__(self, hparams: Hyperparameters, /) -> Any:
        """Return the mean number, (), of the server's steps while a client works."""
        ...


class Published(Protocol):
    """The model that the server publishes."""

    def __call__(self, shared: PyTree, /) -> PyTree | None:
        """Return the parameters that the server state publishes; None if it publishes none."""
        ...


class Outgrown(Protocol):
    """The time at which noise has added up."""

    def __call__(self, sampling_rate: float, hparams: Hyperparameters, /) -> Any:
        """Return the rounds, (), after which the sum of all noise is larger than the remedy's."""
        ...


class NoiseAddsUp(NamedTuple):
    """The remedy for a server's state that adds up the noise of all releases.

    Attributes:
      algorithm: the name of the algorithm.
      remedy: the argument under which the state forgets earlier noise, as `message="steps"`, or
        words.
      outgrown: `(p, hparams) -> rounds`, after which the sum of all noise is larger than the noise
        that the remedy leaves.
    """

    algorithm: str
    remedy: str
    outgrown: Outgrown


class WarmStart(NamedTuple):
    """The functions by which stages of different algorithms follow each other.

    Attributes:
      start: `(key, hparams, published, own_model) -> (shared, personal)`: the first states, from
        the parameters that an earlier stage published and the parameters `own_model` of ONE
        client's predictions. `key` is the same for all clients; `shared` may depend on it and on
        `published` only. None if there is only `init`.
      published: `(shared) -> params`: the parameters that `shared` publishes, or None.
      required: whether the earlier stage must have published parameters; otherwise the task's
        `init` makes missing ones.

    Example:
      >>> fjs.pmtl(task).warm_start.required  # `task` as in `Simulation`
      False
    """

    start: Start | None = None
    published: Published = lambda shared: None
    required: bool = False


class Algorithm(NamedTuple):
    """A federated algorithm, for one client.

    Attributes:
      init: `(key, hparams) -> (shared, personal)`: the first server state and ONE client's personal
        state; neither may depend on private data. With a third argument `fields` it gets the shapes
        and types of a client's fields with one row, each (1, ...).
      client: `(shared, personal, data, hparams, context) -> (personal, message, metrics)`: one
        client's round. `data` is its `ClientData`; `message` is a pytree of float arrays, or `()`
        if nothing is sent; `metrics` are scalars for the researcher, never read by the server.
      server: `(shared, release, hparams, round) -> shared`: the next server state. Here
        `hparams.sampling_rate` is the rate p of any sampler.
      predict: `(shared, personal, hparams, client_id) -> params`: the client's model.
      predict_with_data: `(shared, personal, data, hparams, client_id) -> params`: the model that a
        client makes from its training rows, `data`; evaluations then use it in place of
        `predict`. None if predictions need no rows.
      task: model, loss and metrics.
      hyperparameters: records of the hyperparameters read; `hyperparameters.reads` sets them.
      check: `(hparams)`: raises ValueError if hyperparameters known on the host do not suit the
        algorithm.
      public: sentences on numbers that may depend on private data but are taken as public, such as
        the server's divisor; a guarantee names them among its assumptions.
      warm_start: functions for a stage after, or before, a stage of another algorithm.
      example_epsilon: `(hparams) -> ε`, (): each round, a client's message is ε-differentially
        private for each of its examples, by the client's own noise; charged to its own account.
        None without such noise.
      noise_adds_up: the remedy, if noise adds up in the server's state; or None.
      curvature: L of a step with `hparams.learning_rate`, from the loss's L: the default η is
        1/L, with which no step expands. None keeps the usual default.
      typical_message: `(L) -> C`, the default clip norm of private runs, from the curvature L of
        the loss on bounded rows; see `optimizers.small_update`. None keeps the usual default.
      sends_from_shared: whether a message is a change of the published model that follows from it
        and the client's rows alone, so that the mean message is an estimating equation and standard
        errors are known; see `engine/standard_errors.py`.
      personal_pull: `(shared, personal, data, hparams, client_id) -> Pull`: the penalty that a
        client's personal state descends besides its loss, so that standard errors of personal
        models are known; see `engine/personal_errors.py`. None if it descends something else.
      averages_statistics: whether clients send the change of a model's running statistics
        (BatchNorm), by whose mean the server moves its own. Else no message may hold them.
      at_work: `(hparams) -> ` the server's steps while a client works, on average, of asynchronous
        rounds; `Clock` reads it. None if a round waits for its clients.

    Example:
      >>> mean = fjs.Algorithm(  # the mean of all clients' means of y; `task` as in `Simulation`
      ...     init=lambda key, hparams: (jnp.zeros(()), ()),
      ...     client=lambda shared, personal, data, hparams, context: (
      ...         (), fjs.mean_over_rows(lambda batch: batch.mean(batch.fields["y"]), data), {}
      ...     ),
      ...     server=lambda shared, release, hparams, round_: release,
      ...     predict=lambda shared, personal, hparams, client_id: shared,
      ...     task=task,
      ... )
      >>> mean.hyperparameters
      ()
    """

    init: Init
    client: Client
    server: Server
    predict: Predict
    task: Task
    hyperparameters: Declarations = ()
    check: HyperparameterCheck = lambda hparams: None
    public: tuple[str, ...] = ()
    warm_start: WarmStart = WarmStart()
    predict_with_data: PredictWithData | None = None
    example_epsilon: ExampleEpsilon | None = None
    noise_adds_up: NoiseAddsUp | None = None
    curvature: Curvature | None = None
    typical_message: TypicalMessage | None = None
    sends_from_shared: bool = False
    personal_pull: PersonalPull | None = None
    averages_statistics: bool = False
    at_work: AtWork | None = None

    def __repr__(self) -> str:
        """Name its functions' factories, the hyperparameters with their defaults, and the task."""
        adds_up = "; noise adds up in the server's state" if self.noise_adds_up else ""
        parts = f"clients by {made_by(self.client)}, server by {maker(self.server)}"
        return "\n".join([
            f"Algorithm: {parts}{adds_up}",
            f"  reads {defaults_in_words(self.hyperparameters)}",
            f"  {self.task!r}",
        ])  # fmt: skip

    def on_fields(self, fields: Mapping[str, Any]) -> "Algorithm":
        """Return the algorithm with an `init` of (key, hparams) on a dict `fields` of (N, ...)."""
        try:
            inspect.signature(self.init).bind("key", "hparams")
        except TypeError:
            row = row_shapes(fields)
            return self._replace(init=lambda key, hparams: self.init(key, hparams, row))
        return self


def row_shapes(fields: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return each field's shape and type with one row, as `Algorithm.init` may read them."""
    return {
        name: jax.ShapeDtypeStruct((1, *rows.shape[1:]), dtypes.canonicalize_dtype(rows.dtype))
        for name, rows in fields.items()
    }
