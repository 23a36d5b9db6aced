"""What one task tells the others, and what noise leaves of that (MP-MTL, Figure 2).

    python experiments/mpmtl/leakage.py FILE.png

Ten models of five parameters, uniform in [0, 1]; the last is 100 times as large. One release, and
one low-rank map with ηλ = 50 and K = 100√5: what it makes of the others' models shows the tenth,
unless the release is noised. Columns are divided by their norms.
"""

import math
import sys

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np

import fedjaxsim as fjs
from fedjaxsim.algorithms.server_maps import shrinkage
from fedjaxsim.privacy.calibration import noise_multiplier
from fedjaxsim.privacy.mechanisms.gram import gaussian_gram, wishart
from fedjaxsim.report.plots import STYLE, picture

TASKS, FEATURES, THRESHOLD, EPSILON = 10, 5, 50.0, 0.1
DELTA = 1 / (TASKS * math.log(TASKS))
"""δ = 1/(m log m), as in the paper."""


def models(seed: int = 0) -> np.ndarray:
    """W⁰, (d, m)."""
    w = np.random.default_rng(seed).uniform(size=(FEATURES, TASKS))
    w[:, -1] *= 100
    return w


def sound(epsilon: float) -> float:
    """Return z of one release of the sound mechanism that costs ε, replacing a client's data."""
    everyone = fjs.full_participation().for_clients(TASKS).scheme
    return noise_multiplier(
        epsilon, DELTA, rounds=1, sampling_rate=1.0, scheme=everyone, event=gaussian_gram().event,
        adjacency="replace",
    )  # fmt: skip


def published(w: np.ndarray, mechanism: fjs.Mechanism, z: float, seed: int = 1) -> np.ndarray:
    """M W of one release of a mechanism, (d, m)."""
    hparams = fjs.Hyperparameters(clip=100 * np.sqrt(FEATURES), noise_multiplier=z).as_arrays()
    messages = fjs.Messages(jnp.asarray(w.T[:, :, None], jnp.float32))
    total = mechanism.zero(jax.ShapeDtypeStruct((FEATURES, 1), jnp.float32), TASKS)
    everyone = jnp.ones(TASKS, bool)
    total = mechanism.add(total, messages, everyone, jnp.arange(TASKS), (), hparams)
    key = jax.random.key(seed, impl="threefry2x32")
    release = mechanism.release(total, TASKS, key, (), hparams, 0).value
    return np.asarray(shrinkage(release, THRESHOLD)) @ w


def main(file: str) -> None:
    """Draw the figure, and print how alike the tenth model the others are."""
    w = models()
    panels = {
        "models before": w,
        "no noise": published(w, gaussian_gram(), 0.0),
        f"as published, ε = {EPSILON} claimed": published(w, wishart(), 1 / EPSILON),
        f"sound, ε = {EPSILON}": published(w, gaussian_gram(), sound(EPSILON)),
    }
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = picture("A tenth task, 100 times as large, and the models of the others", 8, 2.3)
        for axes, (title, matrix) in zip(figure.subplots(1, 4), panels.items(), strict=True):
            columns = matrix / np.linalg.norm(matrix, axis=0)
            alike = np.mean(columns[:, :-1].T @ columns[:, -1])
            before = w / np.linalg.norm(w, axis=0)
            kept = np.mean(np.sum(columns[:, :-1] * before[:, :-1], axis=0))
            print(f"{title:32} cosine to the tenth {alike:.3f}, to what they were {kept:.3f}")
            axes.imshow(columns, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
            axes.set_title(f"{title}\ncosine to the tenth: {alike:.2f}")
            axes.set_xlabel("task")
            axes.set_xticks([0, TASKS - 1], ["1", str(TASKS)])
            axes.set_yticks([])
        figure.savefig(file, dpi=100)


if __name__ == "__main__":
    main(sys.argv[1])
