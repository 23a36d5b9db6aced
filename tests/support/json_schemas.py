"""What `--json` prints, by command: scripts of users read it, so names and types stay."""

from typing import Any, get_args

from fedjaxsim.privacy.entries import Status

COUNT, TEXT, TRUTH = {"type": "integer", "minimum": 0}, {"type": "string"}, {"type": "boolean"}
NUMBER, MAYBE = {"type": "number"}, {"type": ["number", "null"]}
TEXTS, MAYBE_TEXT = {"type": "array", "items": TEXT}, {"type": ["string", "null"]}
MAYBE_TEXTS = TEXTS | {"type": ["array", "null"]}
_ADJACENCIES, _VIEWS = ("zero_out", "replace"), ("joint_dp", "released_sequence")


def record(optional: dict[str, Any] | None = None, **required: Any) -> dict[str, Any]:
    """Return the schema of an object with these entries and no others."""
    properties = required | (optional or {})
    return {
        "type": "object", "properties": properties, "required": [*required],
        "additionalProperties": False,
    }  # fmt: skip


def by_name(values: Any) -> dict[str, Any]:
    """Return the schema of an object of entries with any names."""
    return {"type": "object", "additionalProperties": values, "minProperties": 1}


_GUARANTEE = record(
    epsilon=MAYBE, delta=NUMBER, sampling=TEXT, status={"enum": [*get_args(Status)]},
    assumptions=TEXTS, reason=TEXT, unit={"const": "client"}, advantage=MAYBE,
)  # fmt: skip
_REPORT = dict.fromkeys(_ADJACENCIES, record(**dict.fromkeys(_VIEWS, by_name(_GUARANTEE))))
SUMMARY = {
    **dict.fromkeys(("algorithm", "data", "model"), TEXT),
    **dict.fromkeys(("clients", "rounds", "rounds_planned"), COUNT),
    **dict.fromkeys(("interrupted", "stopped_early", "budget_spent"), TRUTH),
    "diverging": {"type": ["integer", "null"]}, "nonfinite": COUNT,
    "worse_than_constant": MAYBE_TEXT, "progress_sample": COUNT,
    **dict.fromkeys(("epsilon", "epsilon_replace", "rounds_per_second"), MAYBE),
    "device_peak_bytes": MAYBE,
    "delta": NUMBER, "noise_multiplier": NUMBER, "cohort": NUMBER,
    **dict.fromkeys(("message_bytes", "server_bytes", "peak_bytes"), COUNT),
}  # fmt: skip
"""The numbers in each `summary.json`, besides metrics and the seconds of phases."""
_ROW = {
    "type": "object", "properties": {"run": TEXT, "assumed": TEXTS, **SUMMARY},
    "required": ["run", "rounds", "epsilon", "delta", "assumed"],
    "patternProperties": {
        "^(train|test|validation)_": {}, "_seconds$": MAYBE,
        "^(epsilon_spent|example_|audit_)": {},
    },
    "additionalProperties": False,
}  # fmt: skip
_SYSTEM = record(
    system=TEXT, metric=TEXT, seeds=COUNT, failed=COUNT, paired_seeds=COUNT,
    **dict.fromkeys(("mean", "half", "deviation", "difference", "difference_half", "p"), MAYBE),
    **dict.fromkeys(("epsilon", "epsilon_replace", "delta"), MAYBE),
)  # fmt: skip
_BYTES = (
    "rows", "states", "server", "rounds", "evaluation", "compiler", "process", "host_states",
    "peak",
)  # fmt: skip
SCHEMAS: dict[str, dict[str, Any]] = {
    "audit": record(
        epsilon=NUMBER, delta=NUMBER, reported=MAYBE, advantage=NUMBER, allowed=MAYBE,
        canaries=COUNT, guesses=COUNT, correct=COUNT, refuted=TRUTH, gaussian=MAYBE,
    ),
    "bench": record(
        machine=by_name({}), settings=by_name({}), rounds_per_second=NUMBER,
        rounds_per_second_range={"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2},
        evaluation_seconds=NUMBER, compile_seconds=NUMBER, rounds_mb=NUMBER, device_peak_mb=MAYBE,
        clients_per_round=NUMBER, chunk_size=COUNT, devices=COUNT,
    ),
    "compare": record(
        runs={"type": "array", "items": _ROW}, systems={"type": "array", "items": _SYSTEM}
    ),
    "data": record(
        columns={"type": "array", "items": by_name({})}, refused={"type": ["string", "null"]},
        clients=COUNT, rows=COUNT, rows_train=COUNT, rows_validation=COUNT, rows_test=COUNT,
        rows_min=COUNT, rows_median=NUMBER, rows_max=COUNT, rows_skewness=NUMBER,
        fields=by_name({"type": "array"}), pictures={"type": ["array", "null"], "items": NUMBER},
        labels={"type": ["array", "null"]}, clipped={}, between_clients=MAYBE, shared_windows={},
        needs_loss=TRUTH,
    ),
    "ls": {
        "type": "array",
        "items": record(
            path=TEXT, kind={"enum": ["run", "sweep", "tuning"]}, rounds=TEXT, seed={},
            metric=MAYBE, epsilon=MAYBE, **dict.fromkeys(("tags", "tuned"), MAYBE_TEXTS),
            **dict.fromkeys(("name", "algorithm", "data", "metric_name", "problem"), MAYBE_TEXT),
        ),
    },
    "plan": record(
        device=TEXT, devices=COUNT, placement={"enum": ["streamed", "in memory"]}, clients=COUNT,
        cohort=COUNT, chunk_size=COUNT, chunk_map={"enum": ["vmap", "scan"]}, needs=COUNT,
        **dict.fromkeys(_BYTES, COUNT), has={"type": ["integer", "null"]},
        fits={"type": ["boolean", "null"]},
    ),
    "privacy": record(
        noise_multiplier=NUMBER, rounds=COUNT, sampling_rate=NUMBER,
        guarantee=record(**_REPORT, assumed=TEXTS),
        dp_accounting={"type": ["object", "null"], "additionalProperties": MAYBE},
    ),
}  # fmt: skip
