"""A run of a folder as an object: its simulation and last state, and what they say of rows."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedjaxsim.data.population import Population
from fedjaxsim.data.source import Source
from fedjaxsim.data.tables.images import read_new_images
from fedjaxsim.data.tables.load import load, read_rows
from fedjaxsim.data.tables.readers import GENERATED, DataSpec
from fedjaxsim.data.tables.table import Roles, read_table, source_of
from fedjaxsim.divergence import Record
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.extras import importing
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.guarantee import Report
from fedjaxsim.runs.assemble import TRANSFORMS, population_of
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.execute import Trained, trained
from fedjaxsim.runs.judging import frame_of, judged
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.runs.settings_files import CONFIG, read_toml
from fedjaxsim.simulation import Simulation

if TYPE_CHECKING:
    import pandas as pd

NEW = "new"
"""The client of rows without one."""
_TABLES = ("csv", "parquet")


class FinishedRun:
    """A run of a folder, from `load_run`. Its files and data are read when they are first used.

    Attributes:
      path: the folder.
    """

    def __init__(self, path: Path):
        self.path, self._directory = path, RunDirectory(path)

    @functools.cached_property
    def config(self) -> RunConfig:
        """The settings."""
        return read_toml(self.path / CONFIG)

    @functools.cached_property
    def _trained(self) -> Trained:
        return trained(self.path)

    @property
    def sim(self) -> Simulation:
        """The simulation, on the run's own data."""
        return self._trained.experiment.simulation

    @property
    def hparams(self) -> Hyperparameters:
        """The hyperparameters."""
        return self._trained.experiment.hparams

    @property
    def state(self) -> SimulationState:
        """The last state that was kept."""
        return self._trained.state

    @functools.cached_property
    def history(self) -> "pd.DataFrame":
        """The evaluations, one row each."""
        with importing("tables"):
            import pandas as pd
        return pd.DataFrame(self._directory.metrics())

    @property
    def summary(self) -> Record:
        """The last metrics, ε and speed."""
        return self._directory.summary()

    @property
    def guarantee(self) -> Report:
        """The guarantee."""
        return self._directory.report()

    def models(self) -> Any:
        """Return the parameters that each client predicts with; see `Simulation.models`."""
        return self.sim.models(self.state, self.hparams)

    def predict(self, rows: Any = None, *, client: str | None = None) -> "pd.DataFrame":
        """Predict rows, in their order; see `Simulation.predict`.

        Args:
          rows: a population, a data frame, or data by name, such as "csv:new.csv"; they need no
            target. By default the run's own rows.
          client: the column with the client of each row, by default the run's. Rows without
            such a column are a new client's.
        """
        population, clipped = self._population(rows, client)
        predictions = self.sim.predict(self.state, self.hparams, population)
        return frame_of(predictions | ({} if clipped is None else {"clipped": clipped}))

    def evaluate(
        self,
        rows: Any = None,
        *,
        split: str = "test",
        client: str | None = None,
        by: Mapping[Any, str] | Literal["class"] | None = None,
    ) -> "pd.DataFrame":
        """Judge personal models and the published one, if there is one, on the same rows.

        Rows of clients who took no part are judged by the published model alone. All numbers are
        computed from private rows: no guarantee covers them.

        Args:
          rows: a population, a data frame, or data by name, such as "csv:new.csv", with targets;
            by default the run's own rows of a split. Rows without clients are a central test set.
          split: of the run's own rows.
          client: the column with the client of each row, by default the run's.
          by: the group of each client by its name, for a line for each group of clients; or "class"
            for a line for each class.

        Returns:
          A line for each model, and group: its clients, their rows, and each metric as the run
          summarizes it, with the mean of the worst tenth of clients. Or, by class, of all rows
          together: the rows of the class, "precision", "recall" and "f1".

        Raises:
          ValueError: nobody's model can judge the rows, a client has no group, or the task
            predicts no classes.
        """
        population = rows
        if rows is not None and not isinstance(rows, Population):
            population, _ = self._population(rows, client, labelled=True)
        return judged(self.sim, self.state, self.hparams, population, split=split, by=by)

    def coefficients(self) -> "pd.DataFrame":
        """Return clients' coefficients in the units of the columns; see `Simulation`."""
        return frame_of(self.sim.coefficients(self.state, self.hparams))

    def standard_errors(
        self, model: Literal["published", "personal"] = "published"
    ) -> "pd.DataFrame":
        """Return coefficients with standard errors; see `Simulation.standard_errors`."""
        return frame_of(self.sim.standard_errors(self.state, self.hparams, model=model))

    def __repr__(self) -> str:
        """Name the folder, the system and the data."""
        return f"FinishedRun({str(self.path)!r}): {self.config.algorithm} on {self.config.data}"

    def _population(
        self, rows: Any, client: str | None, *, labelled: bool = False
    ) -> tuple[Population | None, np.ndarray | None]:
        """Return rows to predict and, if preprocessing hides it, whether each row was clipped."""
        if rows is None or isinstance(rows, Population):
            return rows, None
        population, clipped = self._read(rows, client, labelled), None
        steps = self.config.get("preprocess", ())
        if not steps:
            return population, None
        # Steps act on stored numbers, so new rows are first stored as the run's rows were.
        run_population = population_of(self.config.replace(preprocess=()))
        named, row_columns = run_population.columns.get("x"), population.columns.get("x")
        if named is not None and row_columns is not None:
            clipped = named.beyond(population.fields["x"], row_columns)
            if population.source_row is not None:
                clipped = clipped[np.argsort(population.source_row, kind="stable")]
            stored = named.aligned(population.fields["x"], row_columns)
            population = population.with_field("x", lambda _: stored, named)
        for step in steps:
            run_population = TRANSFORMS[step](run_population)
            if step != "drop-constant":
                population = TRANSFORMS[step](population)
                continue
            columns = population.columns["x"]
            varying = np.isin(columns.names, run_population.columns["x"].names)
            chosen = columns.chosen(varying)
            population = population.with_field(
                "x", lambda x, varying=varying: x[:, varying], chosen
            )
        return population, clipped

    def _read(self, rows: Any, client: str | None, labelled: bool) -> Population:
        """Read a data frame, or data by name, with the roles of columns that the run's data had."""
        settings = self.config.arguments("data")
        spec = DataSpec(rows if isinstance(rows, str) else "")
        if spec.kind == "images" and not labelled:
            names = ("client", "x", "resize", "center_crop")
            how = {name: settings[name] for name in names if name in settings}
            if client is not None:
                how["client"] = client
            trained = [*map(str, self.sim.population.names)]
            return _population(read_new_images(spec.path, trained, **how), spec.path)
        if isinstance(rows, str) and spec.kind not in _TABLES:
            alike = spec.kind == DataSpec(self.config.data).kind
            how: dict[str, Any] = {**settings} if alike else {}
            how |= {} if client is None else {"client": client}
            new_rows = (
                load(rows, test=0.0, **how) if spec.kind in GENERATED else read_rows(rows, how)
            )
            return _population(new_rows, spec.path)
        role_settings: dict[str, Any] = {k: v for k, v in settings.items() if k in Roles._fields}
        roles = Roles(**{"client": None, "target": None, **role_settings})
        explicit, client = client is not None, roles.client if client is None else client
        how = {k: v for k, v in settings.items() if k in ("missing", "sep", "decimal")}
        table = read_table(spec.path, client, **how) if spec else rows
        names = [*getattr(table, "column_names", getattr(table, "columns", ()))]
        if not explicit and client not in names:
            client = None  # rows of a new client
        only_trained = [roles.split, *([] if labelled else [roles.target, roles.row_weights])]
        unread = [*roles.drop, *filter(None, only_trained)]
        dropped = [name for name in unread if name in names and name != client]
        roles = roles._replace(client=client, split=None, time=None)
        if not labelled:
            roles = roles._replace(target=None, row_weights=None)
        roles = roles._replace(drop=() if roles.x else dropped)
        return _population(source_of(table, roles), spec.path or None)


def _population(new_rows: Source | Population, path: str | None) -> Population:
    """Return new rows, none set aside; rows without clients are a new one's."""
    if isinstance(new_rows, Population):
        counts = np.zeros_like(new_rows.counts)
        counts[:, 0] = new_rows.counts.sum(axis=1)
        return dataclasses.replace(new_rows, counts=counts, max_rows=None)
    if new_rows.client is not None:
        return dataclasses.replace(new_rows, split=None).population(path)
    clients = np.zeros(len(next(iter(new_rows.fields.values()))), int)
    return Population.from_rows(
        new_rows.fields, clients, [NEW], source_row=new_rows.source_row, **new_rows.about
    )


def load_run(path: Path | str) -> FinishedRun:
    """Return the run in a folder that `fedjaxsim run --out` wrote.

    Raises:
      FileNotFoundError: the folder holds no run.
    """
    run = FinishedRun(Path(path))
    _ = run.config
    return run
