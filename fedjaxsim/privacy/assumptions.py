"""The words of a privacy report: what guarantees assume, and why there is none."""

import math
from collections.abc import Sequence

from fedjaxsim import checks
from fedjaxsim.privacy.accounting import composition
from fedjaxsim.privacy.events import ChecksSkipped, Prepared, PrivacySpend

TRUSTED_SERVER = (
    "A trusted server clips, sums and noises; clients see only what it publishes and their own."
)
METRICS = (
    "Metrics, losses, norms, realised cohort sizes and choices made with them (early stopping, the "
    "best of a sweep) are not protected: publishing them needs its own budget."
)
KNOWN_SEED = (
    "The noise follows from the seed. Whoever knows or guesses it, as a default or small number, "
    "can subtract the noise: then ε holds only in simulation. No other published run may use the "
    "seed, since runs of one seed draw the same cohorts and noise."
)
SECRET_SEED = (
    "The seed is secret: 63 bits that the operating system drew for this run, kept in its private "
    "files alone. No other published run used it."
)
OWN_MECHANISM = (
    "The mechanism of {} bounds each message and draws the noise that it charges, as its event "
    "says; a run tests only that large messages count no more than others, and that the noise "
    "follows from the key."
)
OWN_EXAMPLES = (
    "Clients noise their messages as `example_epsilon` of the algorithm says; no check of a run "
    "tests that."
)
_OWN_NOISE = tuple(sentence.partition("{}")[0] for sentence in (OWN_MECHANISM, OWN_EXAMPLES))
HYPERPARAMETERS = (
    "Hyperparameters, such as the clip norm and the learning rate, are taken as public, and rows "
    "as they come: ε does not cover numbers computed from private rows before the run, such as "
    "means by which features were scaled."
)
SHARED_SEED = (
    "Runs of one seed share cohorts and noise here, so that they can be compared: at most one of "
    "them may be published under its ε."
)
EVALUATED = (
    "Evaluations released a validation metric with noise, at a charge, and the time to stop "
    "followed from these releases alone."
)
STOPPING = (
    "The guarantee covers the rounds done. It does not cover when to stop, which was chosen by "
    "reading validation rows of the run's own clients without noise."
)
SIMULATION = (
    "Messages, unless a sentence says that they are summed as integers, are summed in floating "
    "point, and noise is drawn so: a simulation of the ideal Gaussian mechanism, not a hardened "
    "deployment."
)
NO_RELEASE = (
    "Rounds without a release (local training, fine-tuning) cost nothing. Publishing personal "
    "models is another matter: each protects all other clients, not its owner."
)
NEW_CLIENTS = (
    "{} clients came later. They start from what was published and send nothing, so they cost the "
    "others nothing, and nobody learns anything of them while their models stay with them."
)
JOINED = (
    "{} of {} clients joined in a later stage: ε holds for clients who took part in all stages, "
    "and is no larger for these."
)
SAME_CLIENTS = (
    "The composed runs have the same clients, each with the same rows. If the rows were divided "
    "anew, as by another seed, the clients are others, and ε covers none of them."
)
OF_CLIENTS = (
    "Values of {} differ between clients and are public: they may not follow from private rows. "
    "What a client learns from its own rows belongs into its personal state."
)
MOST_ROWS = (
    "The largest number of rows of a client in each split is read from the data and taken as "
    "public; declaring max_rows replaces it."
)
DECLARED_ROWS = "Each client has at most {} rows in each split: max_rows, a declared public number."
OF_EXAMPLES = (
    "One example of one client is replaced; its number of examples is public.",
    "Examples are protected from all who see their client's messages, the server included, and not "
    "from the client itself.",
)
OF_SILOS = (
    "One example of one client becomes none, whose place in the client's public number of examples "
    "stays (zero_out), or another one (replace).",
    "Examples are protected from all who see their client's messages or its model, the client's "
    "own staff included: they enter it by gradients of Poisson minibatches, clipped, summed "
    "exactly, as integers, and noised.",
    "ε is the largest of all clients, each at its own δ, and δ the largest of all clients at that "
    "one ε.",
)
OF_PLAN = (
    "Examples are charged for all rounds that were planned, so the time to stop may follow from "
    "releases."
)
UNCHECKED = "functions were not checked (unchecked=True), so clients may leave rows anywhere"
PLANNED = (
    "The noise and the number of rounds of a run without a budget do not follow from what was "
    "released."
)
LIMITED = (
    "The noise and the number of rounds may follow from what was released: ε covers the whole "
    "budget, spent or not, which allows {}."
)
LEVELS = (
    "Clients have privacy levels by group: the guarantees are for clients with share 1. The "
    "group of a client is public, and may not follow from private rows."
)
_LARGE_DELTA = 1e-3
_NOT_AMPLIFIED = (
    "Sampled {} releases cost as much as with all clients: their event does not say what sampling "
    "hides (`amplifies`)."
)
_PREPARED = (
    "The data were adapted to what all {} clients released with noise before round 1, as ranges of "
    "columns. ε covers it; its noise follows from the seed of the data, which must be secret."
)
_NOTHING_SENT = "No client sends anything."


def rests_on_own_noise(sentences: Sequence[str]) -> bool:
    """Return whether a guarantee takes a user's word for the noise that his code draws."""
    return any(sentence.startswith(_OWN_NOISE) for sentence in sentences)


def default_delta(num_clients: int) -> float:
    """Return δ = 1/(10 m), the largest that is reported without a remark.

    δ = 1/m, as in many papers, is met by publishing the data of one random client.

    Example:
      >>> fjs.privacy.default_delta(100)
      0.001
    """
    checks.count(num_clients=num_clients)
    return 1 / (10 * num_clients)


def tiny_silos(counts: Sequence[int], deltas: Sequence[float]) -> tuple[str, ...]:
    """Return a warning of clients with one or two examples, whose δ = 1/(10 n) is large."""
    few = [delta for n, delta in zip(counts, deltas, strict=True) if 0 < n <= 2 and delta >= 0.05]
    if not few:
        return ()
    return (
        f"Warning: {len(few)} clients have one or two examples, whose δ is {max(few):.3g}: give "
        "private_examples a smaller delta, or leave such clients out.",
    )


def of_charges(
    charges: Sequence[PrivacySpend], assumed: Sequence[str], delta: float
) -> tuple[str, ...]:
    """Return the sentences of a guarantee, for charges with a release."""
    if not charges:
        return (_NOTHING_SENT, METRICS)
    sentences = [TRUSTED_SERVER, *dict.fromkeys(map(_of_sampling, charges))]
    for charged in charges:
        if (
            charged.scheme.kind in ("poisson", "cyclic", "allocation")
            and charged.event.known
            and not charged.event.amplifies
        ):
            sentences.append(_NOT_AMPLIFIED.format(charged.event.kind))
        overflow = composition.overflow_probability([charged])
        if overflow > 0:
            sentences.append(
                f"Some cohort exceeds the {charged.scheme.capacity} places with probability at "
                f"most {overflow:.1e}; what full cohorts tell of a client is part of ε."
            )
    if any(charged.scheme.levels for charged in charges):
        sentences.append(LEVELS)
    m = charges[0].scheme.clients
    if delta > default_delta(m):
        sentences.append(
            f"δ = {delta:.3g} is above 1/(10 m) = {default_delta(m):.3g}: publishing the data of "
            f"one random client would meet δ = 1/m = {1 / m:.3g}."
        )
    if delta > _LARGE_DELTA:
        sentences.append(
            f"δ = {delta:.3g} is large: with this probability the guarantee may fail altogether. "
            f"{m} clients alone have so large a default, 1/(10 m); give a smaller δ."
        )
    return (*sentences, HYPERPARAMETERS, *assumed, METRICS, KNOWN_SEED, SIMULATION)


def _of_sampling(charged: PrivacySpend) -> str:
    scheme, m = charged.scheme, charged.scheme.clients
    if isinstance(charged.event, Prepared):
        return _PREPARED.format(m)
    return {
        "poisson": f"Each of the {m} clients takes part independently of all others with the "
        "charged probability, and sums are divided by a public number.",
        "fixed": f"Cohorts of exactly {scheme.capacity} of {m} clients; other clients' "
        "participation reveals a client's own, so sampling hides nothing in joint_dp.",
        "groups": f"{scheme.groups} fixed groups of the {m} clients take part in turn; the groups "
        "are public, so sampling hides nothing.",
        "cyclic": f"{scheme.groups} public groups of the {m} clients have turns; in a turn "
        "each client of the group takes part independently of all others with the charged "
        f"probability times {scheme.groups}, and sums are divided by a public number.",
        "allocation": f"Each of the {m} clients takes part in one round of every "
        f"{scheme.period}, drawn uniformly and independently of all others and hidden from them; "
        "every round counts as if it had the least noise, and an unfinished period as whole.",
        "full": f"All {m} clients take part in every round.",
    }[scheme.kind]


def no_guarantee(charged: PrivacySpend) -> str:
    """Return why no ε exists for rounds of one kind, or an empty string."""
    noise = [entry.noise_multiplier for entry in charged.entries]
    if isinstance(charged.event, ChecksSkipped):
        return charged.event.reason
    if charged.redrawn:
        return (
            "the state drew a round's random numbers twice or from a foreign key, so its noise may "
            "cancel: run again from `init` with a new seed, and change no `round`, `key` or ledger "
            "of a state by hand"
        )
    if charged.overflowed:
        return (
            "the privacy ledger overflowed: it held too few different (z, p) for this run (in "
            "your own loop, give init a noise_multiplier of shape (T,) to make room for T of "
            "them), or rounds came twice or with gaps where their order counts"
        )
    if noise and not charged.event.known:
        return "no guarantee is known for this mechanism"
    if any(math.isnan(z) for z in noise):
        return (
            "the noise multiplier of some round is not a number, or follows from the mechanism's "
            "state or from messages, so that no plan knows it, or a hyperparameter was out of "
            "its range"
        )
    if charged.event.releases and 0 in noise:
        return "no noise was added"
    if charged.event.of_whole_run and len(set(noise)) > 1:
        return f"{charged.event.kind} noise needs one noise multiplier in all rounds of a stage"
    return ""
