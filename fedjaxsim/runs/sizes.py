"""The sizes of a population that exists, or of one that is only described."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.data.population import Population
from fedjaxsim.data.ranges import MOST_ROWS, SPLITS, consecutive
from fedjaxsim.data.splitting import numbers_of_rows
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shard import pieces_of
from fedjaxsim.runs.parts import OF_TOKENS
from fedjaxsim.runs.settings import RunConfig


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a population.

    Attributes:
      clients: m.
      rows: number of rows of all clients, by split.
      largest: largest number of rows of a client, by split.
      few: the population itself, or a small one with the same fields.
    """

    clients: int
    rows: Mapping[str, int]
    largest: Mapping[str, int]
    few: Population

    @property
    def num_rows(self) -> int:
        """Number of rows of all splits."""
        return sum(self.rows.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on the host."""
        return sum(v.nbytes // len(v) for v in self.few.fields.values())

    def longest_piece(self, devices: int) -> int:
        """Return the number of rows that each device holds."""
        if self.few.num_clients == self.clients:
            return pieces_of(self.few, devices)[1]
        return -(-self.clients // devices) * (self.num_rows // self.clients)

    def placed(self, split: str, clients: int, length: int, *, fetched: bool = False) -> Rows:
        """Return the shapes of a split's rows on a device, where 64-bit numbers have 32 bits."""
        number = jax.ShapeDtypeStruct((clients,), jnp.int32)
        fields = {
            name: jax.ShapeDtypeStruct(
                (length, *v.shape[1:]), jax.dtypes.canonicalize_dtype(v.dtype)
            )
            for name, v in self.few.fields.items()
        }
        ids = number if fetched else None
        return Rows.sized(fields, number, number, self.largest[split], self.few.generate, ids)


def sizes_of(population: Population) -> Sizes:
    """Return the sizes of a population."""
    counts = {name: ranges.count for name, ranges in population.splits.items()}
    rows = {name: int(count.sum(dtype=np.int64)) for name, count in counts.items()}
    largest = {name: int(count.max()) for name, count in counts.items()}
    return Sizes(population.num_clients, rows, largest, population)


def sizes_without_data(config: RunConfig, shape: tuple[int, ...], clients: int, rows: int) -> Sizes:
    """Return the sizes of m clients with `rows` rows each, of all splits, of examples of a shape.

    The number of classes and the fractions of the splits are those of the settings.

    Raises:
      ValueError: for a number that is out of range or beyond int32.
    """
    if not shape or min(shape) < 1:
        raise ValueError(f"features must be positive numbers, got {','.join(map(str, shape))}")
    if config.model in OF_TOKENS:
        raise ValueError(f"model {config.model} is planned from data, which have its tokens")
    for name, value, least in (("clients", clients, 1), ("rows-per-client", rows, 2)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if clients * rows > MOST_ROWS:
        raise ValueError(
            f"rows are counted in int32, at most {MOST_ROWS} of all clients together, got "
            f"{clients * rows}: rows-per-client must be at most {MOST_ROWS // clients}, or clients "
            f"at most {MOST_ROWS // rows}"
        )
    test = config.get("test_fraction")
    parts = numbers_of_rows(
        np.array([rows], np.int32),
        config.get("validation_fraction", 0.0),
        0.2 if test is None else test,
    )
    of_one = {name: int(part[0]) for name, part in zip(SPLITS, parts, strict=True)}
    x, y, categories = np.zeros((rows, *shape), np.float32), np.zeros(rows, np.float32), {}
    if config.loss not in ("squared", "logistic"):
        classes = config.get("classes")
        if classes is None:
            raise ValueError(f"loss {config.loss} needs classes, got none")
        y = np.arange(rows, dtype=np.int32) % classes
        categories = {"y": tuple(map(str, range(classes)))}
    one = np.zeros(1, np.int32)
    few = Population({"x": x, "y": y}, consecutive(*parts), one, categories=categories)
    return Sizes(clients, {k: clients * n for k, n in of_one.items()}, of_one, few)
