"""How large the noise is beside Σ, round for round (MP-MTL, Figure 5).

    python experiments/mpmtl/noise_to_signal.py --figure FILE

The low-rank synthetic problem, low-rank method, T = 30 rounds of equal noise from the models of
single-task learning: ‖E‖/‖Σ‖ in Frobenius norm, of each release, and what the shift that keeps the
sound release positive definite adds to it. Means over ten runs.
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
from contenders import METHODS
from data_problems import PROBLEMS
from study import Study, first_personal, read_by

from fedjaxsim.privacy.mechanisms.gram import gaussian_gram
from fedjaxsim.report.plots import COLOURS, STYLE, picture

ROUNDS, RUNS, SHRINKAGE = 30, 10, 30.0
EPSILONS = (0.1, 1.0, 10.0)


def main() -> None:
    """Draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", type=Path, required=True, help="a .png file")
    options = parser.parse_args()
    study = Study(PROBLEMS["low-rank"], Path())
    study.ridge = 3e-4  # as cross-validation chooses
    population = study.problem.read(0)
    own = jax.tree.map(lambda leaf: leaf[0], study.models([population], [0]))
    with mpl.rc_context(STYLE):
        figure = picture("Noise beside signal in 30 releases, low-rank pattern, m = 320", 7, 3.2)
        axes = figure.subplots()
        for name, style in (("low-rank", "solid"), ("low-rank-published", "dashed")):
            method = METHODS[name]
            mechanism = method.mechanism()
            bare = gaussian_gram(psd_deviations=None) if name == "low-rank" else mechanism
            algorithm = method.make(study.task, study.clients)
            simulation = study.simulation(algorithm, mechanism, population, None)
            program, rows = simulation.program, simulation.setup.rows["train"]
            start = first_personal(algorithm, None, own)

            @jax.jit
            def run(
                seed,
                hparams,
                program=program,
                rows=rows,
                start=start,
                mechanism=mechanism,
                bare=bare,
            ):
                state = program.init(jax.random.key(seed, impl="threefry2x32"), hparams)

                def step(state, index):
                    state, _ = program.step(state, hparams, rows)
                    w = state.personal.sent.w[:, :, 0]
                    key = jax.random.fold_in(state.key, index)
                    message = jax.ShapeDtypeStruct((w.shape[1], 1), w.dtype)
                    nothing = mechanism.zero(message, study.clients)
                    noises = [
                        jnp.linalg.norm(one.release(nothing, 1, key, (), hparams, 0).value)
                        for one in (bare, mechanism)
                    ]
                    return state, jnp.stack(noises) / jnp.linalg.norm(w.T @ w)

                state = dataclasses.replace(state, personal=start)
                return jax.lax.scan(step, state, jnp.arange(ROUNDS))[1]

            for epsilon, colour in zip(EPSILONS, COLOURS, strict=False):
                z = method.noise(mechanism, epsilon, study.delta, ROUNDS, study.clients)
                point = study.point(
                    lam=SHRINKAGE * study.unit(method),
                    clip_norm=study.problem.clip_norm,
                    noise_multiplier=z,
                )
                hparams = read_by(simulation, point).as_arrays()
                ratios = np.mean([run(seed, hparams) for seed in range(RUNS)], axis=0)
                rounds = np.arange(1, ROUNDS + 1)
                label = "sound" if name == "low-rank" else "as published"
                title = f"{label}, ε = {epsilon:g}"
                axes.plot(rounds, ratios[:, 0], color=colour, ls=style, label=title)
                if bare is not mechanism:
                    axes.plot(rounds, ratios[:, 1], color=colour, ls=":", label="  with its shift")
                print(f"{label}, ε = {epsilon}: log10 {np.log10(ratios.mean(axis=0))}")
        axes.set_yscale("log")
        axes.set_xlabel("round")
        axes.set_ylabel("‖E‖ / ‖Σ‖")
        figure.legend(loc="outside right center")
        figure.savefig(options.figure, dpi=100)


if __name__ == "__main__":
    main()
