"""What DP-MTRL reaches with the noise of MP-MTL's recipe for it (section 5.1 and Proposition 3).

    python experiments/mpmtl/dp_mtrl_noise.py

One release, the number of iterations that the paper found best. Client i's ridge regression gets
noise b of density ∝ exp(−‖b‖ε/(nΔ_i)), so that any n rows, a whole client, cost ε. Δ_i = 2G_i/(nμ)
for the ridge μ, and G_i is the largest residual of the client's own rows, which have norm 1. The
paper takes G_i from the data, too: such noise has no ε. μ is the best on test rows, so that folds
choose no better one.
"""

import numpy as np

from fedjaxsim.data.synthetic import low_rank_regression

EPSILONS = (1.0, 10.0, 100.0, 1000.0, 10_000.0, np.inf)
RIDGES = 10.0 ** np.arange(-4, 2)


def problem(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return training x (m, n, d) and y (m, n), and the same of test rows."""
    population, w = low_rank_regression(seed=seed)
    parts = []
    for split in ("train", "test"):
        rows = [population.rows(client, split) for client in range(w.shape[1])]
        parts += [np.stack([client[name] for client in rows]).astype(float) for name in ("x", "y")]
    return parts[0], parts[1], parts[2], parts[3]


def ridge_regressions(x: np.ndarray, y: np.ndarray, ridge: float) -> np.ndarray:
    """Minimize ‖X_i w − y_i‖²/(2n) + (μ/2) ‖w‖² for each client: (m, d)."""
    gram = np.einsum("mni,mnj->mij", x, x) / x.shape[1] + ridge * np.eye(x.shape[2])
    return np.linalg.solve(gram, np.einsum("mni,mn->mi", x, y)[..., None] / x.shape[1])[..., 0]


def noise(
    w: np.ndarray, x: np.ndarray, y: np.ndarray, ridge: float, epsilon: float, seed: int
) -> np.ndarray:
    """Draw b for each client, (m, d): its length is Gamma(d, nΔ/ε), its direction uniform."""
    rng = np.random.default_rng(seed)
    residual = np.abs(np.einsum("mnd,md->mn", x, w) - y).max(axis=1)
    lengths = rng.gamma(w.shape[1], 2 * residual / (ridge * epsilon))
    directions = rng.normal(size=w.shape)
    return directions * (lengths / np.linalg.norm(directions, axis=1))[:, None]


def nmse(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    """Compute the pooled squared error over the variance of all targets."""
    return float(np.mean((np.einsum("mnd,md->mn", x, w) - y) ** 2) / np.var(y))


def best(epsilon: float, seed: int) -> float:
    """Return the least nMSE of the noised models over the ridges."""
    x, y, test_x, test_y = problem(seed)
    errors = []
    for ridge in RIDGES:
        w = ridge_regressions(x, y, ridge)
        errors.append(nmse(w + noise(w, x, y, ridge, epsilon, seed), test_x, test_y))
    return min(errors)


def main() -> None:
    """Print the mean over three data sets, beside learning alone."""
    for epsilon in EPSILONS:
        name = "alone" if np.isinf(epsilon) else f"ε = {epsilon:g}"
        print(f"{name:12} {np.mean([best(epsilon, seed) for seed in range(3)]):.3f}")


if __name__ == "__main__":
    main()
