"""Audit sound mechanisms, and mechanisms broken on purpose: which audit or test catches which.

    python benchmarks/audit.py

writes benchmarks/results/audit.json and prints the table of docs/results/audit.md, in a few minutes
on two cores. Broken mechanisms wrap sound ones and keep stating their guarantee.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from common import RESULTS as FOLDER
from common import Record, read_by

import fedjaxsim as fjs
from fedjaxsim.audit.attacks import Attack
from fedjaxsim.audit.canaries import AuditResult, audit
from fedjaxsim.privacy.mechanisms import zeros
from fedjaxsim.privacy.mechanisms.gram import gaussian_gram, wishart
from fedjaxsim.report.files import write_json

CONFIDENCE = 1 - 1e-6
FEATURES, CLASSES = 64, 10  # p = 650
RESULTS = FOLDER / "audit.json"
MakeAlgorithm = Callable[[fjs.Task], fjs.Algorithm]


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


def reads_the_cohort_size() -> Attack:
    """Attack a realised denominator: the norm of the noise reveals the size of the cohort.

    All other clients know whether they took part, so the adversary learns when the canary did, and
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
        clip = float(np.asarray(evidence.hparams.clip))
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
    """Attack a Gram matrix R with isotropic noise: dᵀ R d/C² is 0 or 1, with noise N(0, z²)."""

    def observe(release, directions):
        return jnp.einsum("np,pq,nq->n", directions, release, directions, precision="highest")

    return Attack(observe, lambda evidence: evidence.observed.sum(axis=0))


def support() -> Attack:
    """Attack Wishart noise with one canary w: if it sent, R − w wᵀ is positive definite.

    Then wᵀ R⁻¹ w < 1, which fails with probability 1 − e^(−ε) if it did not send.
    """

    def score(evidence):
        w = float(np.asarray(evidence.hparams.clip)) * evidence.directions  # (1, d)
        return -np.einsum("np,tpq,nq->n", w, np.linalg.inv(evidence.observed), w)

    return Attack(lambda release, directions: release, score)


def silent(task: fjs.Task, size: int) -> fjs.Algorithm:
    """Make clients that send a zero vector (size,) to a server that ignores the release."""

    def client(shared, personal, data, hparams, context):
        del shared, data, hparams, context
        return personal, jnp.zeros(size), {}

    return fjs.Algorithm(
        lambda key, hparams: (task.init(key), ()),
        client,
        lambda shared, release, hparams, round_: shared,
        lambda shared, personal, hparams, client_id: shared,
        task,
    )


def quiet(task: fjs.Task) -> fjs.Algorithm:
    """Make clients that send nothing unless they are canaries; messages have the model's size."""
    return silent(task, (FEATURES + 1) * CLASSES)


def run(
    m: int,
    sampling: fjs.Sampling,
    mechanism: fjs.Mechanism,
    algorithm: MakeAlgorithm,
    values: dict[str, float],
    rounds: int,
    canaries: int | Sequence[int],
    runs: int,
    devices: Sequence[Any] | None = None,
    **settings: Any,
) -> AuditResult:
    """Audit a simulation of m clients with 5 rows each, of 10 classes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5 * m, FEATURES)).astype(np.float32)
    y = np.argmax(x @ rng.normal(size=(FEATURES, CLASSES)), axis=1)
    task = fjs.tasks.softmax(fjs.models.linear((FEATURES,), CLASSES), CLASSES)
    full = sampling.for_clients(m).scheme.kind == "full"
    simulation = fjs.Simulation(
        algorithm(task), fjs.Population.from_flat({"x": x, "y": y}, [5] * m), sampling,
        fjs.Minibatches(5, steps=1), mechanism, chunk_size=64 if full else 2,
        chunk_map="vmap" if full else "scan", devices=devices,
    )  # fmt: skip
    hparams = read_by(simulation, values)
    given = {"canaries": canaries, "runs": runs, "confidence": CONFIDENCE}
    return audit(simulation, hparams, rounds, **given, **settings)


FULL = {"learning_rate": 0.1, "lam": 0.1, "clip": 0.5, "noise_multiplier": 2.0}
POISSON = FULL | {"noise_multiplier": 0.6, "sampling_rate": 0.1}


def with_everyone(
    mechanism: fjs.Mechanism,
    runs: int = 10,
    algorithm: MakeAlgorithm = fjs.fedavg,
    **settings: Any,
) -> AuditResult:
    """Audit 400 canaries among 420 clients, 4 rounds at z = 2: μ = 1."""
    everyone = fjs.full_participation()
    return run(420, everyone, mechanism, algorithm, FULL, 4, 400, runs, **settings)


def with_poisson(
    mechanism: fjs.Mechanism,
    runs: int = 50,
    algorithm: MakeAlgorithm = fjs.pmtl,
    **settings: Any,
) -> AuditResult:
    """Audit 80 canaries among 100 clients, of whom about 10 take part; 20 rounds at z = 0.6."""
    return run(100, fjs.poisson(0.1), mechanism, algorithm, POISSON, 20, 80, runs, **settings)


def one_unclipped(runs: int = 800) -> AuditResult:
    """Audit one client of 8, whose message the mechanism forgets to clip."""
    mechanism = unclipped(fjs.gaussian(), [3])
    return run(8, fjs.full_participation(), mechanism, fjs.fedavg, FULL, 1, [3], runs)


def wishart_as_published(runs: int = 1000) -> AuditResult:
    """Audit one round at the paper's ε = 1, (5, 5) matrices, one canary in each run."""
    return run(
        2, fjs.full_participation(), wishart(), lambda task: silent(task, 5),
        FULL | {"noise_multiplier": 1.0}, 1, [0], runs, attack=support(),
        reported=lambda delta: 1.0,
    )  # fmt: skip


def gram(runs: int = 20) -> AuditResult:
    """Audit the sound mechanism for the same matrices, (200, 200); 4 rounds at z = 2."""
    return run(
        200, fjs.full_participation(), gaussian_gram(), lambda task: silent(task, 200),
        FULL, 4, 200, runs, attack=quadratic(),
    )  # fmt: skip


def poisson_chunks() -> int:
    """Return the number of chunks of one client: the capacity of the cohort."""
    return fjs.poisson(0.1).for_clients(100).scheme.capacity


class Case(NamedTuple):
    """One audit.

    Attributes:
      name: of the mechanism.
      sampling: full or poisson.
      attack: its name.
      run: does the audit.
      tests: names of tests that fail for this mechanism; sound ones have none.
    """

    name: str
    sampling: str
    attack: str
    run: Callable[[], AuditResult]
    tests: tuple[str, ...] = ()


RATIO, SIZE = "likelihood ratio", "reads the cohort size"
REALISED = "realised cohort size as denominator"
_SCALE = ("test_one_noise_draw_a_round_whatever_the_cohort",)
_MOVE = ("test_no_client_moves_the_statistic_by_more_than_the_event_says",)
_EXPECTED = ("test_the_denominator_is_the_expected_cohort_size",)
_WISHART = ("test_wishart_noise_gives_outputs_that_a_neighbour_cannot",)


def _reading(mechanism: fjs.Mechanism) -> AuditResult:
    return with_poisson(mechanism, algorithm=quiet, attack=reads_the_cohort_size())


_HALF, _EVERY_OTHER = half_the_noise(fjs.gaussian()), unclipped(fjs.gaussian(), range(0, 420, 2))
_CHUNKS = noise_per_chunk(fjs.gaussian(), poisson_chunks())
_REALISED = realised_denominator(fjs.gaussian())
CASES = (
    Case("gaussian", "full", RATIO, lambda: with_everyone(fjs.gaussian())),
    Case("gaussian", "poisson", RATIO, lambda: with_poisson(fjs.gaussian())),
    Case("gaussian", "poisson", SIZE, lambda: _reading(fjs.gaussian())),
    Case("gaussian_gram", "full", "quadratic form", gram),
    Case("half the noise", "full", RATIO, lambda: with_everyone(_HALF), _SCALE),
    Case("half the noise", "poisson", RATIO, lambda: with_poisson(_HALF), _SCALE),
    Case(
        "noise with each chunk, empty ones skipped", "poisson", RATIO,
        lambda: with_poisson(_CHUNKS), _SCALE,
    ),
    Case(REALISED, "poisson", RATIO, lambda: with_poisson(_REALISED), _EXPECTED),
    Case(REALISED, "poisson", SIZE, lambda: _reading(_REALISED), _EXPECTED),
    Case(
        "half of the clients not clipped", "full", RATIO,
        lambda: with_everyone(_EVERY_OTHER), _MOVE,
    ),
    Case("one client not clipped", "full", f"{RATIO}, that client", one_unclipped, _MOVE),
    Case("wishart at its published ε", "full", "support", wishart_as_published, _WISHART),
)  # fmt: skip
COLUMNS = ("mechanism", "sampling", "attack", "canaries", "δ", "reported ε", "audit: ε ≥",
           "verdict", "also caught by")  # fmt: skip


def table(rows: Sequence[Record]) -> str:
    """Return the results as Markdown: each audit at the δ where it is nearest to a violation."""

    def nearness(bound: Record) -> float:
        return bound["epsilon"] / max(bound["reported"], 0.01)  # ε is 0 above some δ

    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        result = row["result"]
        best = max(result["bounds"], key=nearness)
        cells = (
            f"{row['mechanism']} ({'sound' if row['sound'] else 'broken'})",
            row["sampling"],
            row["attack"],
            f"{result['canaries'] * result['runs']}",
            *(f"{best[name]:.3g}" for name in ("delta", "reported", "epsilon")),
            "refuted" if result["violated"] else "not refuted",
            ", ".join(f"`{name}`" for name in row["tests"]) or "–",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run all audits, print the table and write the results."""
    rows = []
    for case in CASES:
        begin = time.perf_counter()
        result = case.run()
        seconds = round(time.perf_counter() - begin, 1)
        print(f"{case.name}, {case.sampling}, {case.attack}: {seconds} s\n{result}", flush=True)
        rows.append({
            "mechanism": case.name, "sampling": case.sampling, "attack": case.attack,
            "sound": not case.tests, "tests": list(case.tests), "seconds": seconds,
            "result": result.to_json(),
        })  # fmt: skip
    write_json(RESULTS, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
