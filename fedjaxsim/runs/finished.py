"""A run of a folder as an object: its simulation and last state, and what they say of rows."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedjaxsim.data.aligned import stranger_of
from fedjaxsim.data.population import Population
from fedjaxsim.data.readers import TABLES, DataSpec
from fedjaxsim.data.source import listed
from fedjaxsim.data.tables.images import read_new_images
from fedjaxsim.data.tables.load import read
from fedjaxsim.data.tables.table import Roles, read_table, source_of, table_of, texts
from fedjaxsim.data.tables.user_reader import is_frame, source_of_object
from fedjaxsim.divergence import Record
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.extras import importing
from fedjaxsim.factories import taken_by
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.guarantee import Report
from fedjaxsim.runs.assemble import TRANSFORMS, population_of
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.execute import Trained, trained
from fedjaxsim.runs.judging import frame_of, judged
from fedjaxsim.runs.parts import part_of
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.runs.settings_files import CONFIG, read_toml
from fedjaxsim.simulation import Simulation

if TYPE_CHECKING:
    import pandas as pd


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

    @property
    def _stranger(self) -> str:
        """The client of rows without one."""
        return stranger_of(self.sim.population)

    def models(self) -> Any:
        """Return the parameters that each client predicts with; see `Simulation.models`."""
        return self.sim.models(self.state, self.hparams)

    def predict(self, rows: Any = None, *, client: str | None = None) -> "pd.DataFrame":
        """Predict rows, in their order, with their split and target; see `Simulation.predict`.

        Several targets have columns each, such as "prediction_pay". New rows of a table need no
        target; if they have one it is "target" as read, which may be missing in some rows.

        Args:
          rows: a population, a data frame, or data by name, such as "csv:new.csv"; by default the
            run's own rows.
          client: the column with the client of each row, by default the run's. Rows without
            such a column are a new client's.
        """
        population, clipped, targets = self._population(rows, client)
        predictions = self.sim.predict(self.state, self.hparams, population)
        predictions |= {} if clipped is None else {"clipped": clipped}
        predictions |= {} if targets is None else {"target": targets[predictions["row"]]}
        if self.sim.task.targets is None:  # else rows have tokens, as many as they may be
            predictions = _by_target(predictions, self.sim.reported.y.names)
        return frame_of(predictions)

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
            population, *_ = self._population(rows, client, labelled=True)
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
    ) -> tuple[Population | None, np.ndarray | None, np.ndarray | None]:
        """Return rows to predict, whether each was clipped, if steps hide it, and raw targets."""
        if rows is None or isinstance(rows, Population):
            return rows, None, None
        (population, targets), clipped = self._read(rows, client, labelled), None
        steps = self.config.get("preprocess")
        if not steps:
            _check_shape(population, self.sim.population)
            return population, None, targets
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
        return population, clipped, targets

    def _read(
        self, rows: Any, client: str | None, labelled: bool
    ) -> tuple[Population, np.ndarray | None]:
        """Read a data frame, or data by name, with the roles of columns that the run's data had.

        Also returns the targets as they stand in a table, (N,) or (N, t), if not `labelled`.
        """
        settings = self.config.arguments("data")
        spec = DataSpec(rows).require_known() if isinstance(rows, str) else DataSpec("")
        if spec.kind == "images" and not labelled:
            names = ("client", "x", "resize", "center_crop")
            how = {name: settings[name] for name in names if name in settings}
            if client is not None:
                how["client"] = client
            trained = [*map(str, self.sim.population.names)]
            images = read_new_images(spec.path, trained, **how)
            return images.to_predict(self._stranger).population(spec.path), None
        if spec and spec.kind not in TABLES:
            part, seed = part_of("data", spec.kind), self.config.data_seed
            how = settings if spec.kind == DataSpec(self.config.data).kind else {}
            if spec.is_user_code:
                rows, _ = part.rows(how, seed)
            has_columns = is_frame(rows) if spec.is_user_code else "client" in part.settings
            if client is not None and not has_columns:
                raise ValueError(f"client names a column of a table, which {spec} is not")
            if spec.is_user_code and not has_columns:
                return source_of_object(rows, spec).to_predict(self._stranger).population(), None
            if not spec.is_user_code:
                how = {**how, "seed": seed} | ({} if client is None else {"client": client})
                return read(spec, how).to_predict(self._stranger).population(
                    spec.path or None
                ), None
        named = {role: settings[role] for role in taken_by(Roles) if settings.get(role)}
        roles = Roles(**_roles_in(self.sim.population) | named)
        explicit, client = client is not None, roles.client if client is None else client
        how = {k: v for k, v in settings.items() if k in ("missing", "sep", "decimal")}
        table = read_table(spec.path, client, **how) if spec.path else rows
        names = [*getattr(table, "column_names", getattr(table, "columns", ()))]
        if not explicit and client not in names:
            client = None  # rows of a new client
        only_trained = [roles.split, *([] if labelled else [*roles.targets, roles.row_weights])]
        unread = [*roles.drop, *filter(None, only_trained)]
        if not named.get("target"):  # the run's reader named no columns to drop
            unread += _strange(self.sim.population, names, {client, *roles.targets})
        dropped = [name for name in unread if name in names and name != client]
        targets = None
        if not labelled and roles.targets and {*roles.targets} <= {*names}:
            columns = [table_of(table)[name] for name in roles.targets]
            for column in columns:
                _warn_of_unknown(self.sim.population.categories.get("y"), texts(column.drop_null()))
            arrays = [column.to_numpy() for column in columns]
            targets = arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=1)
        roles = Roles(
            client=client,
            target=roles.target if labelled else None,
            row_weights=roles.row_weights if labelled else None,
            one_hot=[name for name in roles.one_hot if name in names],
            drop=() if roles.x else dropped,
            x=roles.x,
            exposure=roles.exposure,
            drop_missing=roles.drop_missing,
        )
        return source_of(table, roles).to_predict(self._stranger).population(
            spec.path or None
        ), targets


def _check_shape(population: Population, trained: Population) -> None:
    """Check that rows without named columns have the shape that models were trained on."""
    x, ours = (each.fields.get("x") for each in (population, trained))
    if x is None or ours is None or "x" in population.columns or x.shape[1:] == ours.shape[1:]:
        return
    raise ValueError(f"rows must have the run's shape {ours.shape[1:]}, got {x.shape[1:]}")


def _by_target(
    predictions: Mapping[str, np.ndarray], targets: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return predictions with a column for each target in place of (N, t) ones."""
    columns: dict[str, np.ndarray] = {}
    for name, values in predictions.items():
        if values.ndim == 2 and values.shape[1] == len(targets):
            of_targets = zip(targets, values.T, strict=True)
            columns |= {f"{name}_{target}": value for target, value in of_targets}
        else:
            columns[name] = values
    return columns


def _strange(population: Population, names: list[str], others: set[str | None]) -> list[str]:
    """Return the columns of a table that are no features of a population, if it has those."""
    x = population.columns.get("x")
    if x is None:
        return []
    encoded = x.encoded
    features = {encoded.get(name, name) for name in x.names}
    strange = [name for name in names if name not in features | others]
    if not strange or not features <= {*names}:
        return []
    warnings.warn(f"the run reads no columns {listed(strange)}: left out", stacklevel=2)
    return strange


def _warn_of_unknown(classes: Sequence[str] | None, targets: np.ndarray) -> None:
    """Warn of targets of new rows that are no class of the run, so that no prediction is right."""
    if classes is None:
        return
    names = [str(name).removesuffix(".0") for name in targets]  # whole numbers beside missing ones
    known = {name.removesuffix(".0") for name in classes}
    if unknown := [name for name in names if name not in known]:
        warnings.warn(
            f"{len(unknown)} of {len(names)} targets are no class of the run, such as "
            f"{unknown[0]!r}: it knows {listed(classes)} alone, and predicts no other",
            stacklevel=2,
        )


def _roles_in(population: Population) -> dict[str, Any]:
    """Return the targets and the encoded columns of a table, as a population names them."""
    x, y = population.columns.get("x"), population.columns.get("y")
    return {
        "target": () if y is None else y.names,
        "one_hot": () if x is None else [*dict.fromkeys(x.encoded.values())],
    }


def load_run(path: Path | str) -> FinishedRun:
    """Return the run in a folder that `fedjaxsim run --out` wrote.

    Raises:
      FileNotFoundError: the folder holds no run.
    """
    run = FinishedRun(Path(path))
    _ = run.config
    return run
