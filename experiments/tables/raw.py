"""Systems on eleven raw tables, as they lie on the web, beside what a statistician fits.

    python experiments/tables/raw.py OUT [--tables NAME …]

reads CSV files of github.com/vincentarelbundock/Rdatasets in FEDJAXSIM_DATA/rdatasets, shows each
by `fedjaxsim data show`, and runs `raw.toml` on it: numbers, classes by name, a rare class, counts,
counts with exposure, ordered classes, censored times, missing values. GLM, GEE, MixedLM, ordered
and proportional-hazards models of statsmodels (extra `own-tables`) are fitted to the same training
rows. It prints the table of experiments/tables/README.md and writes OUT/raw-tables.csv. A second
call computes what is missing.
"""

import os
import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import tomli_w
from tables import (
    NO_RELEASE,
    designs,
    error_of,
    markdown,
    mixed,
    parsed,
    results_of,
    rows_of,
    scores_of,
)

from fedjaxsim import cli
from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.data.population import Population
from fedjaxsim.runs.assemble import population_of
from fedjaxsim.runs.settings import run_config
from fedjaxsim.runs.sweep_results import read_runs

SWEEP = Path(__file__).parent / "raw.toml"
RARE = "log loss"
MEASURES = {
    "squared": ("nMSE", "test_nmse"),
    "logistic": ("wrong", "test_accuracy_weighted"),
    RARE: ("log loss", "test_loss_weighted"),
    "poisson": ("deviance", "test_deviance_weighted"),
    "ordinal": ("classes off", "test_off_weighted"),
    "cox": ("pairs wrong", "test_concordance"),
}
"""The error of each loss, and the metric of runs; shares of right ones are subtracted from 1."""


class Raw(NamedTuple):
    """A raw table: its file, roles of columns, public ranges, and what else a run is given.

    `measure` is the loss unless errors are measured otherwise.
    """

    file: str
    client: str
    target: str
    loss: str
    ranges: str = ""
    one_hot: str = ""
    drop: str = "rownames"
    more: dict[str, Any] = {}  # noqa: RUF012
    measure: str = ""


TABLES = {
    "gapminder": Raw(
        "gapminder/gapminder", "country", "lifeExp", "squared",
        "year=1950:2010 pop=0:1500000000 gdpPercap=0:60000 lifeExp=20:90", "continent",
    ),
    "Exam": Raw(
        "mlmRev/Exam", "school", "normexam", "squared", "schavg=-1:1 standLRT=-3:3 normexam=-4:4",
        "schgend,vr,intake,sex,type", "rownames,student",
    ),
    "MathAchieve": Raw(
        "nlme/MathAchieve", "School", "MathAch", "squared", "SES=-4:3 MEANSES=-2:2 MathAch=-3:25",
        "Minority,Sex",
    ),
    "Gcsemv": Raw(
        "mlmRev/Gcsemv", "school", "written", "squared", "course=0:100 written=0:90", "gender",
        "rownames,student", {"drop-missing": True},
    ),
    "Contraception": Raw(
        "mlmRev/Contraception", "district", "use", "logistic", "age=-15:20", "livch,urban",
        "rownames,woman",
    ),
    "bacteria": Raw("MASS/bacteria", "ID", "y", "logistic", "week=0:12", "ap,hilo,trt"),
    "egsingle": Raw(
        "mlmRev/egsingle", "schoolid", "retained", "logistic",
        "year=-3:3 black=0:1 hispanic=0:1 grade=0:6 math=-6:6 size=0:1500 lowinc=0:100 "
        "mobility=0:100", "female",
        "rownames,childid", {"prior": 0.05}, RARE,
    ),
    "medpar": Raw(
        "COUNT/medpar", "provnum", "los", "poisson", drop="rownames,type",
        more={"prior": 10.0, "learning-rate": 0.01},
    ),
    "Fatalities": Raw(
        "AER/Fatalities", "state", "fatal", "poisson",
        "year=1980:1990 spirits=0:5 unemp=0:20 income=5000:25000 beertax=0:3 baptist=0:35 "
        "mormon=0:70 drinkage=18:21 dry=0:50 miles=4000:15000", "breath",
        "rownames,emppop,jail,service,nfatal,sfatal,fatal1517,nfatal1517,fatal1820,nfatal1820,"
        "fatal2124,nfatal2124,afatal,pop1517,pop1820,pop2124,milestot,unempus,emppopus,gsp",
        {"exposure": "pop", "prior": 0.0002, "learning-rate": 2e-5},
    ),
    "ScotsSec": Raw(
        "mlmRev/ScotsSec", "primary", "attain", "ordinal", "verbal=-40:40 social=0:35", "sex",
        "rownames,second",
    ),
    "cancer": Raw(
        "survival/cancer", "inst", "time", "cox",
        "age=30:90 sex=1:2 ph.ecog=0:4 ph.karno=0:100 pat.karno=0:100", "",
        "rownames,status,meal.cal,wt.loss", {"drop-missing": True, "batch-size": 64},
    ),
}  # fmt: skip


def settings_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the settings of a table's runs; censored times become negative in a copy."""
    table = TABLES[name]
    file = Path(os.environ["FEDJAXSIM_DATA"]) / "rdatasets" / f"{table.file}.csv"
    if table.loss == "cox":
        frame = pd.read_csv(file, dtype={table.client: str})
        frame[table.target] *= np.where(frame["status"] == 2, 1, -1)
        file = folder / f"{name}.csv"
        frame.to_csv(file, index=False)
    optional = {"range": table.ranges.split(), "one-hot": table.one_hot.split(",")}
    return {
        "data": f"csv:{file}", "client": table.client, "target": table.target, "loss": table.loss,
        "drop": table.drop.split(","), **{key: v for key, v in optional.items() if any(v)},
        **table.more,
    }  # fmt: skip


def shown(settings: dict[str, Any]) -> None:
    """Run `fedjaxsim data show` with the settings that it reads."""
    flags = []
    for key, value in settings.items():
        if key in ("loss", "prior", "batch-size", "learning-rate"):
            continue
        values = value if key == "range" else [",".join(value) if type(value) is list else value]
        for each in values:
            flags += [f"--{key}"] if each is True else [f"--{key}={each}"]
    if code := cli.main(["data", "show", *flags]):
        raise SystemExit(code)


def of_systems(name: str, folder: Path) -> list[list[Any]]:
    """Show the table, run its sweep, or what it lacks, and return the results."""
    settings, file = settings_of(name, folder), folder / f"{name}.toml"
    shown(settings)
    asked = tomllib.loads(SWEEP.read_text()) | settings
    if settings["loss"] in ("ordinal", "cox"):  # MP-MTL knows losses of linear outputs alone
        for axes in asked["sweep"]:
            axes["algorithm"] = [one for one in _listed(axes["algorithm"]) if one != "mpmtl"]
    file.write_text(tomli_w.dumps(asked))
    if code := cli.main(["sweep", str(file), "--out", str(folder / name), "--quiet"]):
        raise SystemExit(code)
    _, metric = MEASURES[TABLES[name].measure or TABLES[name].loss]
    results = []
    for run in read_runs(folder / name)[0]:
        epsilon, value = run.settings["target_epsilon"], run.value(metric)
        if value is not None and metric.startswith(("test_accuracy", "test_concordance")):
            value = 1 - value
        title = SYSTEMS[run.settings["algorithm"]].title
        results.append([title, NO_RELEASE if epsilon is None else f"{epsilon:g}", run.seed, value])
    return results


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def of_statistics(name: str, folder: Path, seeds: Sequence[int]) -> list[list[Any]]:
    """Return the results of statsmodels' models on the rows that the systems train on."""
    settings = {key.replace("-", "_"): v for key, v in settings_of(name, folder).items()}
    results = []
    for seed in seeds:
        population = population_of(run_config(**settings, algorithm="local", seed=seed))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for method, error in fitted(name, population).items():
                results.append([method, NO_RELEASE, seed, error])
    return results


def fitted(name: str, population: Population) -> dict[str, float | None]:
    """Return the errors of statsmodels' models by their names."""
    from statsmodels import api  # pyright: ignore[reportMissingImports]
    from statsmodels.miscmodels.ordinal_model import (  # pyright: ignore[reportMissingImports]
        OrderedModel,
    )

    loss, measure = TABLES[name].loss, TABLES[name].measure or TABLES[name].loss
    train, test = rows_of(population, "train"), rows_of(population, "test")
    x, new = designs(train, test)
    if loss == "squared":
        pooled = api.OLS(train.y, x).fit().predict(new)
        predicted = {"pooled": pooled, "MixedLM": mixed(train, test)}
        return {key: error_of(values, test.y, False) for key, values in predicted.items()}
    if loss == "ordinal":
        fit = OrderedModel(train.y, x[:, 1:], distr="logit").fit(method="bfgs", disp=False)
        classes = np.unique(train.y)[np.argmax(fit.predict(new[:, 1:]), axis=1)]
        return {"pooled": float(np.mean(np.abs(classes - test.y)))}
    if loss == "cox":
        happened, strata = train.y > 0, train.client
        model = api.PHReg(np.abs(train.y), x[:, 1:], status=happened, strata=strata, ties="breslow")
        hazards = new[:, 1:] @ model.fit().params
        shares = [
            concordance(hazards[test.client == k], test.y[test.client == k])
            for k in np.unique(test.client)
        ]
        return {"pooled": 1 - float(np.nanmean(shares))}
    family = api.families.Poisson() if loss == "poisson" else api.families.Binomial()
    exposure, new_exposure = (
        {"exposure": population.fields["exposure"][population.splits[split].all_rows()]}
        if "exposure" in population.fields
        else {}
        for split in ("train", "test")
    )
    alike = {"groups": train.client, "cov_struct": api.cov_struct.Exchangeable()}
    fits = {
        "pooled": api.GLM(train.y, x, family=family, **exposure).fit(),
        "GEE": api.GEE(train.y, x, family=family, **exposure, **alike).fit(),
    }
    predicted = {key: fit.predict(new, **new_exposure) for key, fit in fits.items()}
    if measure == "logistic":
        predicted["MixedLM"] = mixed(train, test)
        return {key: error_of(values, test.y, True) for key, values in predicted.items()}
    errors = {}
    for key, mean in predicted.items():
        y = test.y
        if measure == RARE:
            losses = -np.where(y > 0, np.log(mean), np.log1p(-mean))
        else:
            losses = 2 * (y * np.log(np.maximum(y, 1e-300) / mean) - y + mean)
        errors[key] = float(np.mean(losses))
    return errors


def concordance(hazards: np.ndarray, y: np.ndarray) -> float:
    """Return Harrell's C of rows whose censored times are negative; NaN without comparable ones."""
    time = np.abs(y)
    later = (time[None] > time[:, None]) | ((time[None] == time[:, None]) & (y[None] <= 0))
    pairs = later & (y > 0)[:, None]
    wins = (hazards[:, None] > hazards[None]) + 0.5 * (hazards[:, None] == hazards[None])
    return float(wins[pairs].mean()) if pairs.any() else np.nan


def title_of(name: str) -> str:
    """Return the name of a table with what its errors are."""
    return f"{name}, {MEASURES[TABLES[name].measure or TABLES[name].loss][0]}"


def main() -> None:
    """Compute what the folder lacks and print the table."""
    args = parsed(main.__doc__, TABLES)
    scores = scores_of(results_of(args, of_systems, of_statistics, title_of, "raw-tables.csv"))
    print(markdown(scores, [NO_RELEASE, "inf"]), markdown(scores, ["1", "4"]), sep="\n\n")


if __name__ == "__main__":
    main()
