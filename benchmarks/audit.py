"""Audit sound mechanisms, and mechanisms broken on purpose: which are refuted?

    python benchmarks/audit.py

prints the table of benchmarks/audit.md, in a few minutes on two cores: the runs of a row are one
program. A broken mechanism wraps a sound one and keeps stating its ε.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import read_by

import fedjaxsim as fjs
from fedjaxsim.audit.bounds import result
from fedjaxsim.audit.canaries import with_canaries
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.privacy.guarantee import Report
from fedjaxsim.privacy.mechanisms import zeros
from fedjaxsim.privacy.mechanisms.protocol import stamped

CLIENTS, ROUNDS, DELTA = 5, 16, 1e-3
Change = Callable[[fjs.Mechanism], fjs.Mechanism]


def drawing(
    mechanism: fjs.Mechanism, change: Callable[[jax.Array, jax.Array], jax.Array], key: Any = None
) -> fjs.Mechanism:
    """Draw noise of change(z, round) and charge z; with a `key`, the same noise in all rounds."""

    def release(accumulator, denominator, round_key, state, hparams, round_):
        z = hparams.noise_multiplier
        drawn = hparams.replace(noise_multiplier=change(z, round_))
        of_key = round_key if key is None else key
        out = mechanism.release(accumulator, denominator, of_key, state, drawn, round_)
        return out._replace(noise_multiplier=z)

    return mechanism._replace(release=release)


def half_the_noise(mechanism: fjs.Mechanism, share: float = 0.5) -> fjs.Mechanism:
    """Draw noise of half, or a share, of the standard deviation that is charged."""
    return drawing(mechanism, lambda z, _: share * z)


def _counting(mechanism: fjs.Mechanism, count: Callable[[jax.Array], Any]) -> fjs.Mechanism:
    """Keep a count beside the sum; `release` must separate the two."""

    def zero(message, num_clients):
        del num_clients
        return zeros((message, jax.ShapeDtypeStruct((), jnp.result_type(float))))

    def add(accumulator, messages, mask, ids, state, hparams):
        total, counted = accumulator.total
        inner = accumulator._replace(total=total)
        inner = mechanism.add(inner, messages, mask, ids, state, hparams)
        return inner._replace(total=(inner.total, counted + count(mask)))

    return mechanism._replace(zero=zero, add=add)


def noise_per_chunk(mechanism: fjs.Mechanism, chunks: int) -> fjs.Mechanism:
    """Add a share of the noise, z C/√chunks, with each chunk; empty chunks are skipped.

    One draw has the variance of the sum of these shares.
    """

    def release(accumulator, denominator, key, state, hparams, round_):
        total, present = accumulator.total
        z = hparams.noise_multiplier
        shares = hparams.replace(noise_multiplier=z * jnp.sqrt(present / chunks))
        inner = accumulator._replace(total=total)
        out = mechanism.release(inner, denominator, key, state, shares, round_)
        return out._replace(noise_multiplier=z)

    return _counting(mechanism, lambda mask: 1)._replace(release=release)


def realised_denominator(mechanism: fjs.Mechanism) -> fjs.Mechanism:
    """Divide by the number of clients that took part instead of p m."""

    def release(accumulator, denominator, key, state, hparams, round_):
        del denominator
        total, present = accumulator.total
        inner = accumulator._replace(total=total)
        return mechanism.release(inner, jnp.maximum(present, 1), key, state, hparams, round_)

    return _counting(mechanism, lambda mask: jnp.sum(mask))._replace(release=release)


def unclipped(mechanism: fjs.Mechanism, ids: Sequence[int]) -> fjs.Mechanism:
    """Forget to clip the messages of some clients."""

    def add(accumulator, messages, mask, client_ids, state, hparams):
        free = jnp.isin(client_ids, jnp.asarray(ids))
        loose = hparams.replace(clip=jnp.full((), jnp.inf))
        accumulator = mechanism.add(accumulator, messages, mask & ~free, client_ids, state, hparams)
        return mechanism.add(accumulator, messages, mask & free, client_ids, state, loose)

    return mechanism._replace(add=add)


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
    "cyclic": lambda: fjs.privacy.cyclic(0.25, groups=2),
}


def simulated(
    sampling: str,
    mechanism: fjs.Mechanism,
    noise_multiplier: float = 4.0,
    **settings: Any,
) -> tuple[fjs.Simulation, fjs.Hyperparameters]:
    """Return a simulation of five clients and 648 parameters.

    A mechanism passes for the package's: audits look for what its check of others' finds at once.
    """
    mechanism = stamped(mechanism)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6 * CLIENTS, 80)).astype(np.float32)
    y = np.argmax(x @ rng.normal(size=(80, 8)), axis=1)
    population = fjs.Population.from_flat({"x": x, "y": y}, [6] * CLIENTS)
    task = fjs.tasks.softmax(fjs.models.linear((80,), 8), 8)
    simulation = fjs.Simulation(
        fjs.fedavg(task), population, SAMPLINGS[sampling](), fjs.Minibatches(6, steps=1), mechanism,
        chunk_size=64, chunk_map="vmap", **settings,
    )  # fmt: skip
    rate = 0.25 if sampling == "cyclic" else 0.5
    values = {"clip": 1.0, "sampling_rate": rate, "learning_rate": 0.1}
    return simulation, read_by(simulation, values | {"noise_multiplier": noise_multiplier})


def states_of(
    sampling: str, mechanism: fjs.Mechanism, runs: int, canaries: int = 400, z: float = 4.0
) -> tuple[list[SimulationState], Report]:
    """Return the last states of `runs` runs of 16 rounds, and the guarantee of each."""
    simulation, hparams = simulated(sampling, mechanism, z)
    audited = with_canaries(simulation, hparams, canaries)
    arrays, rows = audited.check(hparams), audited.placed["train"]

    def run(key):
        return audited.program.rounds(audited.program.init(key, arrays), arrays, rows, ROUNDS)[0]

    keys = jax.random.split(jax.random.key(1, impl="threefry2x32"), runs)
    states = jax.jit(lambda keys: jax.lax.map(run, keys))(keys)
    of_each = [jax.tree.map(lambda leaf, k=k: leaf[k], states) for k in range(runs)]
    return of_each, audited.guarantee(of_each[0], DELTA)


def row(name: str, sampling: str, states: Sequence[SimulationState], report: Report) -> str:
    """Return a row of the table: audits of single runs, and one of all runs together."""
    alone, together = [result([state], report) for state in states], result(states, report)
    refuted = sum(one.refuted for one in alone)
    return (
        f"| {name} | {sampling} | {together.reported:.3g} | "
        f"{np.median([one.epsilon for one in alone]):.2f} | {refuted} of {len(alone)} | "
        f"{together.epsilon:.2f} | {'yes' if together.refuted else 'no'} |"
    )


def main() -> None:
    """Print the table."""
    print("| mechanism | sampling | reported ε | one run: ε ≥ | refuted | 20 runs: ε ≥ | refuted |")
    print("|---|---|---|---|---|---|---|")
    cases = [("gaussian (sound)", sampling, fjs.gaussian()) for sampling in SAMPLINGS]
    cases.append(("correlated (sound)", "groups", fjs.privacy.correlated(bands=3)))
    cases.append(("banded (sound)", "cyclic", fjs.privacy.banded(bands=2)))
    cases += [(name, "full", change(fjs.gaussian())) for name, change in BROKEN.items()]
    cases += [
        (
            "noise with each chunk, empty ones skipped",
            "poisson",
            noise_per_chunk(fjs.gaussian(), 16),
        ),
        ("realised cohort size as denominator", "poisson", realised_denominator(fjs.gaussian())),
    ]
    for name, sampling, mechanism in cases:
        print(row(name, sampling, *states_of(sampling, mechanism, 20)), flush=True)


if __name__ == "__main__":
    main()
