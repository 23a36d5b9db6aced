"""Audits of sound doors, and of doors broken on purpose: which audit or test catches which.

    python benchmarks/audit.py

writes benchmarks/results/audit.json and prints the table of docs/results/audit.md, in a few minutes
on two cores. Broken mechanisms wrap sound ones and keep stating their guarantee.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.audit.attacks import Attack
from fedjaxsim.audit.canaries import AuditResult, audit
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.models.model import linear
from fedjaxsim.privacy.mechanisms import Mechanism, gaussian, zeros
from fedjaxsim.privacy.mechanisms.gram import gaussian_gram
from fedjaxsim.privacy.mechanisms.wishart import wishart
from fedjaxsim.privacy.samplers import Sampling, full_participation, poisson
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import Task, softmax

CONFIDENCE = 1 - 1e-6
FEATURES, CLASSES = 64, 10  # p = 650
RESULTS = Path(__file__).parent / "results" / "audit.json"


# --- doors broken on purpose ----------------------------------------------------------------------


def half_the_noise(door: Mechanism) -> Mechanism:
    """Draws noise of half the standard deviation that it charges."""

    def release(accumulator, denominator, key, state, hparams, round_):
        z = hparams.noise_multiplier
        half = hparams.replace(noise_multiplier=z / 2)
        out = door.release(accumulator, denominator, key, state, half, round_)
        return out._replace(noise_multiplier=z)

    return door._replace(release=release)


def _counting(door: Mechanism, count: Callable[[jax.Array], Any]) -> Mechanism:
    """The door with a count beside its sum; its `release` must take it apart."""

    def zero(message, num_clients):
        del num_clients
        return zeros((message, jax.ShapeDtypeStruct((), jnp.result_type(float))))

    def add(accumulator, messages, mask, ids, state, hparams):
        total, counted = accumulator.total
        inner = accumulator._replace(total=total)
        inner = door.add(inner, messages, mask, ids, state, hparams)
        return inner._replace(total=(inner.total, counted + count(mask)))

    return door._replace(zero=zero, add=add)


def noise_per_chunk(door: Mechanism, chunks: int) -> Mechanism:
    """Adds a chunk's share of the noise, z C/√chunks, with each chunk; empty chunks are skipped.

    One draw of the variance that the shares add up to stands for them.
    """

    def release(accumulator, denominator, key, state, hparams, round_):
        total, present = accumulator.total
        z = hparams.noise_multiplier
        shares = hparams.replace(noise_multiplier=z * jnp.sqrt(present / chunks))
        inner = accumulator._replace(total=total)
        out = door.release(inner, denominator, key, state, shares, round_)
        return out._replace(noise_multiplier=z)

    return _counting(door, lambda mask: 1)._replace(release=release)


def realised_denominator(door: Mechanism) -> Mechanism:
    """Divides by the number of clients that took part instead of p m."""

    def release(accumulator, denominator, key, state, hparams, round_):
        del denominator
        total, present = accumulator.total
        inner = accumulator._replace(total=total)
        return door.release(inner, jnp.maximum(present, 1), key, state, hparams, round_)

    return _counting(door, lambda mask: jnp.sum(mask))._replace(release=release)


def unclipped(door: Mechanism, ids: Sequence[int]) -> Mechanism:
    """Forgets to clip the messages of some clients."""

    def add(accumulator, messages, mask, client_ids, state, hparams):
        free = jnp.isin(client_ids, jnp.asarray(ids))
        loose = hparams.replace(clip_norm=jnp.full((), jnp.inf))
        accumulator = door.add(accumulator, messages, mask & ~free, client_ids, state, hparams)
        return door.add(accumulator, messages, mask & free, client_ids, state, loose)

    return door._replace(add=add)


# --- attacks made for one door --------------------------------------------------------------------


def reads_the_cohort_size() -> Attack:
    """Against a realised denominator: the noise's norm tells how many clients took part.

    All other clients know whether they did, so the adversary learns when the canary did, and
    sampling hides it no longer. The score is the log-likelihood ratio of release and noise norm,
    for other clients that send nothing outside the canaries' directions.
    """

    def observe(release, directions):
        flat = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(release)])
        along = jnp.matmul(directions, flat, precision=jax.lax.Precision.HIGHEST)
        return along, jnp.sum(jnp.square(flat)) - jnp.sum(jnp.square(along))

    def score(evidence):
        along, rest = evidence.observed  # (T, n), (T,)
        n, size = evidence.directions.shape
        clip = float(np.asarray(evidence.hparams.clip_norm))
        z, p = float(np.asarray(evidence.hparams.noise_multiplier)), evidence.sampling_rate
        took_part = evidence.took_part
        others = (took_part.sum(axis=0) - took_part[evidence.ids]).T  # (T, n)

        def log_likelihood(present, message):
            divisor = np.maximum(others + present, 1)
            x = along * divisor / clip - message
            squares = rest[:, None] * (divisor / clip) ** 2
            return (size - n + 1) * np.log(divisor) - (x**2 + squares) / (2 * z**2)

        absent = np.log1p(-p) + log_likelihood(0, 0)
        sent = np.logaddexp(absent, np.log(p) + log_likelihood(1, 1))
        kept = np.logaddexp(absent, np.log(p) + log_likelihood(1, 0))
        return (sent - kept).sum(axis=0)

    return Attack(observe, score)


def quadratic() -> Attack:
    """On a Gram matrix R with isotropic noise: dᵀ R d/C², which is 0 or 1 and N(0, z²)."""

    def observe(release, directions):
        return jnp.einsum("np,pq,nq->n", directions, release, directions, precision="highest")

    return Attack(observe, lambda evidence: evidence.observed.sum(axis=0))


def support() -> Attack:
    """On a Wishart door, with one canary w: R − w wᵀ is positive definite if it sent.

    That is wᵀ R⁻¹ w < 1, which fails with probability 1 − e^(−ε) if it did not.
    """

    def score(evidence):
        w = float(np.asarray(evidence.hparams.clip_norm)) * evidence.directions  # (1, d)
        return -np.einsum("np,tpq,nq->n", w, np.linalg.inv(evidence.observed), w)

    return Attack(lambda release, directions: release, score)


# --- cases ----------------------------------------------------------------------------------------


def problem(m: int) -> tuple[Population, Task]:
    """A population of m clients with 5 rows each, of 10 classes, and its task."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5 * m, FEATURES)).astype(np.float32)
    y = np.argmax(x @ rng.normal(size=(FEATURES, CLASSES)), axis=1)
    population = Population.from_flat({"x": x, "y": y}, [5] * m)
    return population, softmax(linear((FEATURES,), CLASSES), CLASSES)


def silent(task: Task, size: int) -> Algorithm:
    """Clients that send a zero vector (size,) to a server that does nothing with the release."""

    def client(shared, personal, data, hparams, context):
        del shared, data, hparams, context
        return personal, jnp.zeros(size), {}

    return Algorithm(
        lambda key, hparams: (task.init(key), ()),
        client,
        lambda shared, release, hparams, round_: shared,
        lambda shared, personal, hparams, client_id: shared,
        task,
    )


def simulation(
    m: int,
    sampling: Sampling,
    door: Mechanism,
    algorithm: Callable[[Task], Algorithm],
    devices: Sequence[Any] | None = None,
) -> Simulation:
    """The simulation that the cases share, of `m` clients."""
    population, task = problem(m)
    everyone = sampling.for_clients(m).scheme.kind == "full"
    return Simulation(
        algorithm(task),
        population,
        sampling,
        Minibatches(5, steps=1),
        door,
        chunk_size=64 if everyone else 2,
        chunk_map="vmap" if everyone else "scan",
        devices=devices,
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """One audit.

    Attributes:
      name: of the door.
      sampling: who takes part, for people.
      attack: for people.
      sound: whether the report holds.
      run: does the audit.
      tests: names of tests that fail for this door.
    """

    name: str
    sampling: str
    attack: str
    sound: bool
    run: Callable[[], AuditResult]
    tests: tuple[str, ...] = ()


EVERYONE = {"learning_rate": 0.1, "lam": 0.1, "clip_norm": 0.5, "noise_multiplier": 2.0}
POISSON = EVERYONE | {"noise_multiplier": 0.6, "sampling_rate": 0.1}


def read_by(sim: Simulation, values: Mapping[str, float]) -> Hyperparameters:
    """The hyperparameters of a simulation from values for all: those that it reads."""
    return sim.hyperparameters(**{n: value for n, value in values.items() if n in sim.records})


def quiet(task: Task) -> Algorithm:
    """Clients that send nothing unless they are canaries, with as many numbers as the model has."""
    return silent(task, (FEATURES + 1) * CLASSES)


def with_everyone(
    door: Mechanism,
    runs: int = 10,
    algorithm: Callable[[Task], Algorithm] = fedavg,
    devices: Sequence[Any] | None = None,
    **settings: Any,
) -> AuditResult:
    """400 canaries among 420 clients, 4 rounds at z = 2: μ = 1."""
    sim = simulation(420, full_participation(), door, algorithm, devices)
    hparams = read_by(sim, EVERYONE)
    return audit(sim, hparams, 4, canaries=400, runs=runs, confidence=CONFIDENCE, **settings)


def with_poisson(
    door: Mechanism,
    runs: int = 50,
    algorithm: Callable[[Task], Algorithm] = pmtl,
    **settings: Any,
) -> AuditResult:
    """80 canaries among 100 clients, of whom about 10 take part; 20 rounds at z = 0.6."""
    sim = simulation(100, poisson(0.1), door, algorithm)
    hparams = read_by(sim, POISSON)
    return audit(sim, hparams, 20, canaries=80, runs=runs, confidence=CONFIDENCE, **settings)


def one_unclipped(runs: int = 800) -> AuditResult:
    """The audit of one client of 8, whose message the door forgets to clip."""
    sim = simulation(8, full_participation(), unclipped(gaussian(), [3]), fedavg)
    hparams = read_by(sim, EVERYONE)
    return audit(sim, hparams, 1, canaries=[3], runs=runs, confidence=CONFIDENCE)


def wishart_as_published(runs: int = 1000) -> AuditResult:
    """One round at the paper's ε = 1, (5, 5) matrices, one canary in each run."""
    sim = simulation(2, full_participation(), wishart(), lambda task: silent(task, 5))
    return audit(
        sim,
        read_by(sim, EVERYONE | {"noise_multiplier": 1.0}),
        1,
        canaries=[0],
        runs=runs,
        confidence=CONFIDENCE,
        attack=support(),
        reported=lambda delta: 1.0,
    )


def gram(runs: int = 20) -> AuditResult:
    """The sound door for the same matrices, (200, 200), with 200 canaries; 4 rounds at z = 2."""
    sim = simulation(200, full_participation(), gaussian_gram(), lambda task: silent(task, 200))
    return audit(
        sim,
        read_by(sim, EVERYONE),
        4,
        canaries=200,
        runs=runs,
        confidence=CONFIDENCE,
        attack=quadratic(),
    )


def poisson_chunks() -> int:
    """Chunks of one client, as many as the cohort has places."""
    return poisson(0.1).for_clients(100).scheme.capacity


_SCALE = ("test_one_noise_draw_a_round_whatever_the_cohort",)
_MOVE = ("test_no_client_moves_the_statistic_by_more_than_the_event_says",)
CASES = (
    Case("gaussian", "full", "likelihood ratio", True, lambda: with_everyone(gaussian())),
    Case("gaussian", "poisson", "likelihood ratio", True, lambda: with_poisson(gaussian())),
    Case(
        "gaussian",
        "poisson",
        "reads the cohort size",
        True,
        lambda: with_poisson(gaussian(), algorithm=quiet, attack=reads_the_cohort_size()),
    ),
    Case("gaussian_gram", "full", "quadratic form", True, gram),
    Case(
        "half the noise",
        "full",
        "likelihood ratio",
        False,
        lambda: with_everyone(half_the_noise(gaussian())),
        _SCALE,
    ),
    Case(
        "half the noise",
        "poisson",
        "likelihood ratio",
        False,
        lambda: with_poisson(half_the_noise(gaussian())),
        _SCALE,
    ),
    Case(
        "noise with each chunk, empty ones skipped",
        "poisson",
        "likelihood ratio",
        False,
        lambda: with_poisson(noise_per_chunk(gaussian(), poisson_chunks())),
        _SCALE,
    ),
    Case(
        "realised cohort size as denominator",
        "poisson",
        "likelihood ratio",
        False,
        lambda: with_poisson(realised_denominator(gaussian())),
        ("test_the_denominator_is_the_expected_cohort_size",),
    ),
    Case(
        "realised cohort size as denominator",
        "poisson",
        "reads the cohort size",
        False,
        lambda: with_poisson(
            realised_denominator(gaussian()), algorithm=quiet, attack=reads_the_cohort_size()
        ),
        ("test_the_denominator_is_the_expected_cohort_size",),
    ),
    Case(
        "half of the clients not clipped",
        "full",
        "likelihood ratio",
        False,
        lambda: with_everyone(unclipped(gaussian(), range(0, 420, 2))),
        _MOVE,
    ),
    Case(
        "one client not clipped",
        "full",
        "likelihood ratio, that client",
        False,
        one_unclipped,
        _MOVE,
    ),
    Case(
        "wishart at its published ε",
        "full",
        "support",
        False,
        wishart_as_published,
        ("test_wishart_noise_gives_outputs_that_a_neighbour_cannot",),
    ),
)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown: each audit at the δ where it comes nearest to a violation."""

    def nearness(bound):
        return bound["epsilon"] / max(bound["reported"], 0.01)  # ε is 0 above some δ

    lines = [
        "| mechanism | sampling | attack | canaries | δ | reported ε | audit: ε ≥ | verdict | "
        "also caught by |",
        "|" + "---|" * 9,
    ]
    for row in rows:
        result = row["result"]
        best = max(result["bounds"], key=nearness)
        verdict = "refuted" if result["violated"] else "not refuted"
        tests = ", ".join(f"`{name}`" for name in row["tests"]) or "–"
        cells = (
            f"{row['door']} ({'sound' if row['sound'] else 'broken'})",
            row["sampling"],
            row["attack"],
            f"{result['canaries'] * result['runs']}",
            f"{best['delta']:.3g}",
            f"{best['reported']:.3g}",
            f"{best['epsilon']:.3g}",
            verdict,
            tests,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    rows = []
    for case in CASES:
        begin = time.perf_counter()
        result = case.run()
        seconds = time.perf_counter() - begin
        print(f"{case.name}, {case.sampling}, {case.attack}: {seconds:.0f} s\n{result}", flush=True)
        rows.append(
            {
                "door": case.name,
                "sampling": case.sampling,
                "attack": case.attack,
                "sound": case.sound,
                "tests": list(case.tests),
                "seconds": round(seconds, 1),
                "result": result.to_json(),
            }
        )
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
