"""Tuning by hypergradients against grids, on PP-SGD's synthetic problem.

    python benchmarks/tuning.py [--seeds 10] [--parts synthetic laws] [--out FILE]

* synthetic: 1,000 clients who all take part, d = 100, fresh batches of 10, T = 100 rounds, at
  ε ∈ {0.5, 2, ∞}, δ = 10⁻⁴. Tuned are η_w, η_θ and C (as η_w + η_θ, η_w/η_θ and C), from one
  poor start for all ε; the objective is the mean over seeds of the clients' excess risk after the
  last round. z follows from ε, δ and T, which stay. The grid is that
  of Figure 1a (11 step sizes × 9 levels) at each of five C, 495 points; and one of as many points
  around the best of them. Everything is measured with the same seeds, and what is found is measured
  again with as many others. A run-equivalent is one run of one seed: a point of a grid costs 1, a
  value with three derivatives in forward mode 4 (and less time than that, see hypergradients.py).
* laws: the price of privacy d(risk)/dε of the same problem with 50, 200 and 800 clients.

The data are public here; on private data, tuning needs a budget of its own, by grids or gradients.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import tyro
from common import FIGURES, RESULTS, Record, update, use_all_cores, with_error
from ppsgd_grid import LEVELS, RATES

import fedjaxsim as fjs
from fedjaxsim.data.synthetic import regression_stream
from fedjaxsim.gradients.objectives import mean_metric
from fedjaxsim.gradients.seeds import over_seeds
from fedjaxsim.gradients.whole_run import price_of_privacy
from fedjaxsim.privacy.accounting.in_loop import noise_multiplier_in_jit
from fedjaxsim.report.plots import COLOURS, STYLE, picture, save
from fedjaxsim.tasks.known_risk import known_regression
from fedjaxsim.tune import ObjectiveValue, SeedGradient, Step, descend

N, FEATURES, BATCH, ROUNDS, DELTA = 1000, 100, 10, 100, 1e-4
EPSILONS = (0.5, 2.0, math.inf)
CLIPS = (1.0, 3.0, 10.0, 30.0, 100.0)
NAMES = ("learning_rate", "personalization", "clip_norm")
START = {"step": 0.02, "level": 10.0, "clip_norm": 100.0}
"""η_w + η_θ, a = η_w/η_θ and C: the risk hardly falls in 100 rounds."""
METRIC, SPLIT = "excess_risk", "test"
_WORST = 300.0
"""The risk of the last colour."""
Point = dict[str, float]


# --- PP-SGD's synthetic problem -------------------------------------------------------------------


def synthetic(
    clients: int, parametrization: Literal["grid", "paper"] = "grid", **chunking: Any
) -> fjs.Simulation:
    """Make the simulation of the problem."""
    population, task = regression_stream(clients, FEATURES), known_regression(FEATURES)
    algorithm = fjs.ppsgd(task, parametrization=parametrization)
    minibatches = fjs.Minibatches(BATCH, steps=1)
    return fjs.Simulation(algorithm, population, fjs.full_participation(), minibatches, **chunking)


def noise_for(epsilon: float) -> float:
    """Return the noise multiplier z(ε, δ, T), 0 for ε = ∞."""
    if math.isinf(epsilon):
        return 0.0
    one = jnp.ones(())
    return float(noise_multiplier_in_jit(jnp.asarray(epsilon), DELTA, one, ROUNDS))


class InSteps:
    """The objective in the coordinates of the descent: η_w + η_θ, a = η_w/η_θ and C.

    Runs diverge where the sum of the step sizes is too large, so that the cliff lies along one of
    these coordinates. With the paper's parametrization, which has no kink at a = 1, η_θ = η/N and
    α = a/N.
    """

    def __init__(self, measure: SeedGradient, seeds: int):
        self.measure, self.cost = measure, measure.runs / seeds

    def __call__(self, point: Point, keys: jax.Array | None = None) -> ObjectiveValue:
        """Measure the objective and its derivatives at a point, by the chain rule."""
        step, level = point["step"], point["level"]
        inside = {
            "learning_rate": N * step / (1 + level),
            "personalization": level / N,
            "clip_norm": point["clip_norm"],
        }
        measured = self.measure(inside, keys)
        by_log = {name: g * inside[name] for name, g in measured.gradients.items()}
        by_level = by_log["personalization"] - by_log["learning_rate"] * level / (1 + level)
        gradients = {
            "step": by_log["learning_rate"] / step,
            "level": by_level / level,
            "clip_norm": measured.gradients["clip_norm"],
        }
        return ObjectiveValue(measured.values, gradients)


def in_grid(point: Mapping[str, float]) -> Point:
    """Return a point of the descent as one of the grid: η = max(η_w, η_θ), a and C."""
    level = point["level"]
    return {
        "learning_rate": point["step"] * max(level, 1.0) / (1 + level),
        "personalization": level,
        "clip_norm": point["clip_norm"],
    }


def points_of(*axes: Sequence[float]) -> list[Point]:
    """Return the product of the axes of η, a and C."""
    return [dict(zip(NAMES, values, strict=True)) for values in itertools.product(*axes)]


def around(best: Mapping[str, float]) -> list[Point]:
    """Return a finer grid around the best point, with as many points as the coarse one."""
    rate, level, clip = (best[name] for name in NAMES)
    if level == 0:
        levels = [0.0, *np.geomspace(0.003, 0.1, 8)]
    elif math.isinf(level):
        levels = [*np.geomspace(100, 3000, 8), math.inf]
    else:
        levels = list(level * np.geomspace(1 / 3, 3, 9))
    rates, clips = rate * np.geomspace(0.6, 1 / 0.6, 11), clip * np.geomspace(1 / 2, 2, 5)
    return points_of(*(list(map(float, axis)) for axis in (rates, levels, clips)))


def tune_synthetic(
    epsilon: float, seeds: int, most: int, sweep: fjs.Simulation, single: fjs.Simulation
) -> Record:
    """Compare the coarse and the fine grid with the descent at one ε."""
    keys = jax.random.split(jax.random.key(1), 2 * seeds)
    search, fresh = keys[:seeds], keys[seeds:]
    base = sweep.hyperparameters(clip_norm=1.0, noise_multiplier=noise_for(epsilon))
    begin = time.perf_counter()

    def gradient(simulation, keys):
        return SeedGradient(simulation, base, ROUNDS, NAMES, keys, metric=METRIC, split=SPLIT)

    def grid(points, keys):
        found = gradient(sweep, keys).on_grid(points)
        assert found is not None
        return found

    coarse_points = points_of(RATES, LEVELS, CLIPS)
    coarse = grid(coarse_points, search)
    fine_points = around(coarse_points[coarse.best])
    fine = grid(fine_points, search)
    of_grids = time.perf_counter() - begin

    begin = time.perf_counter()
    measure = InSteps(gradient(single, search), seeds)
    path = descend(measure, START, steps=most - 1, cost=measure.cost)
    of_descent = time.perf_counter() - begin
    best = path.best
    elsewhere = measure(best.point, fresh)
    slopes = np.array([elsewhere.gradients[name] * best.point[name] for name in START])
    errors = np.std(slopes, axis=1, ddof=1) / math.sqrt(seeds)
    both = np.hypot(errors, [best.gradient_error[name] for name in START])
    coarse_means, fine_means = coarse.values.mean(axis=1), fine.values.mean(axis=1)
    at_ten = [v for v, p in zip(coarse_means, coarse_points, strict=True) if p["clip_norm"] == 10]
    targets = {
        "grid of Figure 1a, C = 10": (float(np.nanmin(at_ten)), len(at_ten)),
        "grid with five C": (float(coarse_means[coarse.best]), coarse.values.shape[0]),
        "grid and finer grid": (
            float(min(fine_means[fine.best], coarse_means[coarse.best])),
            coarse.values.shape[0] + fine.values.shape[0],
        ),
    }
    rivals = {"grid with five C": coarse_points[coarse.best], "finer grid": fine_points[fine.best]}
    judged = grid(list(rivals.values()), fresh).values
    result = {
        "epsilon": None if math.isinf(epsilon) else epsilon,
        "noise_multiplier": float(base.noise_multiplier),  # pyright: ignore[reportArgumentType]
        "stopped": path.stopped,
        "path": [record(step) for step in path.steps],
        "tuned": in_grid(best.point),
        "tuned_value": best.value,
        "targets": {
            name: {"value": value, "runs": points, **reached(path.steps, value, points)}
            for name, (value, points) in targets.items()
        },
        "best_points": {name: _finite(point) for name, point in rivals.items()},
        "fresh": {
            "tuned": with_error(elsewhere.values),
            **{name: with_error(v) for name, v in zip(rivals, judged, strict=True)},
            "slope": np.mean(slopes, axis=1).tolist(),
            # Where C is beyond all norms, both are 0.
            "slope_in_standard_errors": (
                np.mean(slopes, axis=1) / np.where(both > 0, both, 1.0)
            ).tolist(),
        },
        "seconds": {"grids": of_grids, "descent": of_descent},
        "contour": contour(coarse_points, coarse_means, best.point["clip_norm"]),
    }
    print({k: v for k, v in result.items() if k not in ("path", "contour")}, flush=True)
    return result


def record(step: Step) -> Record:
    """Return what is kept of a point that a descent measured."""
    return {
        "point": in_grid(step.point),
        "value": step.value,
        "error": step.standard_error,
        "slope": step.gradient,
        "slope_error": step.gradient_error,
        "kept": step.accepted,
        "runs": step.runs,
    }


def reached(steps: Sequence[Step], value: float, points: int) -> Record:
    """Return the run-equivalents for each seed until the descent is as good, and the ratio."""
    for step in steps:
        if step.accepted and step.value <= value:
            return {"reached_after": step.runs, "times_fewer": points / step.runs}
    return {"reached_after": None, "times_fewer": None}


def _finite(point: Mapping[str, float]) -> dict[str, float | str]:
    return {name: value if math.isfinite(value) else "inf" for name, value in point.items()}


def contour(points: Sequence[Point], values: np.ndarray, clip: float) -> Record:
    """Return the plane of the coarse grid whose C is nearest to the tuned one."""
    nearest = min(CLIPS, key=lambda c: abs(math.log(c / clip)))
    plane = [v for v, p in zip(values, points, strict=True) if p["clip_norm"] == nearest]
    table = np.reshape(plane, (len(RATES), len(LEVELS)))
    table = np.where(np.isfinite(table), table, 1e30)
    return {"clip_norm": nearest, "values": [[float(f"{v:.4g}") for v in row] for row in table]}


def draw(results: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Draw the descents over the grid, and the risk against the run-equivalents."""
    planes = [np.array(result["contour"]["values"])[:, 1:-1].T for result in results]
    levels = np.geomspace(min(values.min() for values in planes), _WORST, 14)
    with mpl.rc_context(STYLE):
        figure = picture("PP-SGD's synthetic problem; ε: zero-out, joint DP", 8.6, 5.8)
        panels = figure.subplots(2, len(results), sharex="row", sharey="row")
        shown: Any = None
        for (above, below), values, result in zip(panels.T, planes, results, strict=True):
            shown = above.contourf(
                RATES, LEVELS[1:-1], np.clip(values, None, _WORST), levels, norm="log",
                cmap="viridis_r",
            )  # fmt: skip
            kept = [step["point"] for step in result["path"] if step["kept"]]
            above.plot(*_columns(kept), "o-", color=COLOURS[1], markersize=3, linewidth=1)
            above.plot(*_columns([result["tuned"]]), "*", color=COLOURS[1], markersize=11)
            epsilon = "∞" if result["epsilon"] is None else f"{result['epsilon']:g}"
            title = f"ε = {epsilon}, grid at C = {result['contour']['clip_norm']:g}"
            above.set(xscale="log", yscale="log", xlabel="step size η", title=title)
            runs = [step["runs"] for step in result["path"]]
            risks = [step["value"] if step["kept"] else np.inf for step in result["path"]]
            below.plot(runs, np.minimum.accumulate(risks), color=COLOURS[1], label="descent")
            looks = zip("os^", (0, 2, 3), result["targets"].items(), strict=True)
            for marker, colour, (name, target) in looks:
                style: Any = {"marker": marker, "ls": "none", "color": COLOURS[colour]}
                below.plot(target["runs"], target["value"], label=name, **style)
            below.set(xscale="log", yscale="log", xlabel="run-equivalents for each seed")
        panels[0, 0].set_ylabel("level a = η_w / η_θ")
        panels[1, 0].set_ylabel("excess risk")
        ticks = [tick for tick in (1, 3, 10, 30, 100, 300) if tick > levels[0]]
        bar = figure.colorbar(shown, ax=list(panels[0]), label="excess risk", ticks=ticks)
        bar.ax.set_yticklabels([f"{tick:g}" for tick in ticks])
        handles, labels = panels[1, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    save(figure, out)


def _columns(points: Sequence[Mapping[str, float]]) -> tuple[list[float], list[float]]:
    return [p["learning_rate"] for p in points], [p["personalization"] for p in points]


# --- the price of privacy -------------------------------------------------------------------------


def prices(seeds: int) -> list[Record]:
    """Measure the price of privacy, its mean over seeds with standard error."""
    rows = []
    values = {"learning_rate": 0.7, "personalization": 3.0, "clip_norm": 3.0}
    keys = jax.random.split(jax.random.key(2), seeds)
    for clients, epsilon in itertools.product((50, 200, 800), (0.5, 2.0, 8.0)):
        simulation = synthetic(clients, chunk_map="vmap", chunk_size=50)
        objective = mean_metric(simulation, METRIC, SPLIT)
        price = over_seeds(price_of_privacy(simulation, objective, ROUNDS, delta=DELTA))
        estimate = price(keys, simulation.hyperparameters(**values), epsilon)
        (value, slope), (_, error) = estimate.mean, estimate.standard_error
        numbers = {"value": float(value), "price": float(slope), "standard_error": float(error)}
        rows.append({"clients": clients, "epsilon": epsilon, **numbers})
        print(rows[-1], flush=True)
    return rows


def main(
    parts: Sequence[Literal["synthetic", "laws"]] = ("synthetic", "laws"),
    epsilons: Sequence[float] = EPSILONS,
    seeds: int = 10,
    most: int = 24,
    out: Path = RESULTS / "tuning.json",
    figure: Path = FIGURES / "tuning-against-grids.png",
) -> None:
    """Compare tuning by hypergradients with grids.

    Args:
      parts: that are measured.
      epsilons: of the part synthetic.
      seeds: of the objective, and as many others to judge.
      most: points that a descent measures.
      out: a JSON file for the results, updated part by part.
      figure: a .png file for the part synthetic.
    """
    use_all_cores()
    results: Record = {"jax": jax.__version__}
    if "synthetic" in parts:
        simulations = synthetic(N), synthetic(N, "paper", chunk_map="vmap", chunk_size=250)
        rows = [tune_synthetic(epsilon, seeds, most, *simulations) for epsilon in epsilons]
        results["synthetic"] = {"rounds": ROUNDS, "seeds": seeds, "results": rows}
        draw(rows, figure)
    if "laws" in parts:
        results["price_of_privacy"] = {"seeds": seeds, "rows": prices(seeds)}
    update(out, results)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
