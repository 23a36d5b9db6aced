"""Audits inside one run, of sound mechanisms and of mechanisms broken on purpose.

    python benchmarks/one_run_audit.py

prints the table of docs/results/audit.md: 100 sound and 20 broken runs of each kind as one program
each. A broken mechanism keeps stating its ε.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from audit import drawing, half_the_noise, noise_per_chunk, realised_denominator, unclipped
from common import read_by

import fedjaxsim as fjs
from fedjaxsim.audit.one_run import OneRunResult, result, with_canaries

CLIENTS, ROUNDS, DELTA = 5, 16, 1e-3
Change = Callable[[fjs.Mechanism], fjs.Mechanism]


BROKEN: dict[str, Change] = {
    "half the noise": half_the_noise,
    "no noise after a quarter of the rounds": lambda mechanism: drawing(
        mechanism, lambda z, round_: jnp.where(round_ < ROUNDS // 4, z, 0.0)
    ),
    "one noise for all rounds": lambda mechanism: drawing(
        mechanism, lambda z, _: z, jax.random.key(5, impl="threefry2x32")
    ),
    "half of the clients not clipped": lambda mechanism: unclipped(mechanism, range(0, 10**4, 2)),
}
SAMPLINGS: dict[str, Callable[[], fjs.Sampling]] = {
    "full": fjs.full_participation,
    "poisson": lambda: fjs.poisson(0.5),
    "groups": lambda: fjs.privacy.fixed_groups(groups=2),
}


def audits(
    sampling: str,
    mechanism: fjs.Mechanism,
    runs: int,
    canaries: int = 400,
    noise_multiplier: float = 4.0,
) -> list[OneRunResult]:
    """Audit `runs` runs of five clients, 648 parameters and 16 rounds as one program."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6 * CLIENTS, 80)).astype(np.float32)
    y = np.argmax(x @ rng.normal(size=(80, 8)), axis=1)
    population = fjs.Population.from_flat({"x": x, "y": y}, [6] * CLIENTS)
    task = fjs.tasks.softmax(fjs.models.linear((80,), 8), 8)
    simulation = fjs.Simulation(
        fjs.fedavg(task), population, SAMPLINGS[sampling](), fjs.Minibatches(6, steps=1), mechanism,
        chunk_size=64, chunk_map="vmap",
    )  # fmt: skip
    values = {"clip": 1.0, "sampling_rate": 0.5, "learning_rate": 0.1}
    hparams = read_by(simulation, values | {"noise_multiplier": noise_multiplier})
    audited = with_canaries(simulation, hparams, canaries)
    arrays, rows = audited.check(hparams), audited.placed["train"]

    def run(key):
        return audited.program.rounds(audited.program.init(key, arrays), arrays, rows, ROUNDS)[0]

    keys = jax.random.split(jax.random.key(1, impl="threefry2x32"), runs)
    states = jax.jit(lambda keys: jax.lax.map(run, keys))(keys)
    report = audited.guarantee(jax.tree.map(lambda leaf: leaf[0], states), DELTA)
    of_each = [jax.tree.map(lambda leaf, k=k: leaf[k], states) for k in range(runs)]
    return [result(state, report) for state in of_each]


def row(name: str, sampling: str, found: list[OneRunResult]) -> str:
    """Return a row of the table."""
    bounds = [one.epsilon for one in found]
    above = sum(one.epsilon > (one.reported or 0) for one in found)
    refuted = sum(one.refuted for one in found)
    reported = found[0].reported
    assert reported is not None
    return (
        f"| {name} | {sampling} | {reported:.3g} | {np.median(bounds):.2f} | {max(bounds):.2f} | "
        f"{above} of {len(found)} | {refuted} of {len(found)} |"
    )


def main() -> None:
    """Print the table."""
    print("| mechanism | sampling | reported ε | median bound | largest | above ε | refuted |")
    print("|---|---|---|---|---|---|---|")
    for sampling in SAMPLINGS:
        print(row("gaussian (sound)", sampling, audits(sampling, fjs.gaussian(), 100)))
    correlated = fjs.privacy.correlated(bands=3)
    print(row("correlated (sound)", "groups", audits("groups", correlated, 100)))
    for name, change in BROKEN.items():
        print(row(name, "full", audits("full", change(fjs.gaussian()), 20)))
    chunks = noise_per_chunk(fjs.gaussian(), 16)
    print(row("noise with each chunk", "poisson", audits("poisson", chunks, 20)))
    realised = realised_denominator(fjs.gaussian())
    print(row("realised cohort size", "poisson", audits("poisson", realised, 20)))


if __name__ == "__main__":
    main()
