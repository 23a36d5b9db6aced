"""The page of `accelerator.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedjaxsim.report.progress import number

FORMS, PEER = "convolutions", "peer-"


def place(record: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the default's place among the sizes tried, 1 for the fastest, and their number."""
    if record["default"] is None or not record["chunks"]:
        return None
    speed = record["default"]["rounds_per_second"]
    others = [each.get("rounds_per_second", 0.0) for each in record["chunks"]]
    return 1 + sum(other > speed for other in others), 1 + len(others)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def of(value: float, ceiling: float | None) -> str:
    """Return a rate as a part of a ceiling."""
    return "–" if not ceiling else f"{100 * value / ceiling:.3g} %"


def megabytes(numbers: Mapping[str, Any]) -> str:
    """Return the device's peak, where it is known; else that of the process."""
    peak = numbers["device_peak_mb"]
    return number(numbers["rounds_mb"] if peak is None else peak)


def page(results: Mapping[str, Any]) -> str:
    """Return everything as Markdown."""
    limits, measured = results["ceilings"] or {}, results["measured"]
    lines = ["# An accelerator", ""]
    if results["rehearsal"]:
        lines += ["A rehearsal: tiny sizes on a CPU.", ""]
    if limits:
        there, size = limits["machine"], limits["memory_bytes"]
        lines += [
            f"{there['devices']} {there['device_kind']} ({there['platform']}), "
            f"{number(size and size / 2**30)} GiB to be allocated, JAX "
            f"{there['versions']['jax']}; {results['seconds']:.0f} s for everything.",
            "",
            f"Products of float32 {number(limits['float32_gflops'])} GFLOP/s, of bfloat16 "
            f"{number(limits.get('bfloat16_gflops'))}; memory {number(limits['memory_gb_per_s'])} "
            "GB/s.",
            "",
        ]
    rows, chunks = [], []
    for name, record in measured.items():
        default = record["default"]
        if default is None:
            if name != FORMS and not name.startswith(PEER):
                rows.append([name, record["status"], *["–"] * 6])
            continue
        speed = default["rounds_per_second"]
        flops, moved = default["gflop_per_round"] * speed, default["mb_per_round"] * speed / 1e3
        rows.append([
            name, number(speed), number(default["compile_seconds"]), megabytes(default),
            number(flops), of(flops, limits.get("float32_gflops")),
            of(flops, limits.get("bfloat16_gflops")), of(moved, limits.get("memory_gb_per_s")),
        ])  # fmt: skip
        for each in [{**default, "default": True}, *record["chunks"]]:
            if each["chunk_size"] is None:
                continue
            size = f"{each['chunk_size']} (default)" if "default" in each else each["chunk_size"]
            if "error" in each:
                chunks.append([name, str(size), each["error"], "–", "–", "–"])
                continue
            quotient = each["rounds_per_second"] / speed
            chunks.append(
                [name, str(size), number(each["rounds_per_second"]), f"{quotient:.3g}",
                 number(each["compile_seconds"]), megabytes(each)]
            )  # fmt: skip
    headings = ["workload", "rounds/s", "compile s", "MB", "GFLOP/s", "of float32", "of bfloat16",
                "of memory"]  # fmt: skip
    lines += ["## Workloads", "", *table(headings, rows), "## Clients at once", ""]
    lines += table(
        ["workload", "chunk size", "rounds/s", "of the default's", "compile s", "MB"], chunks
    )
    ranks = {name: place(record) for name, record in measured.items()}
    lines += [f"- {name}: the default is {r[0]} of {r[1]}" for name, r in ranks.items() if r]
    lines += [""]
    if forms := measured.get(FORMS, {"told": ()})["told"]:
        lines += ["## Convolutions", "", "A step of the papers' CNN, clients side by side.", ""]
        times = [[each["name"], number(1e3 * each["seconds"]), number(each["first_seconds"])]
                 for each in forms]  # fmt: skip
        lines += table(["form", "ms", "first s"], times)
    if peers := [each for name in measured if PEER in name for each in measured[name]["told"]]:
        lines += ["## Peers", "", "The CNN, 100 of 206 writers a round, random images.", ""]
        rows = []
        for each in peers:
            speed = each.get("rounds_per_s")
            words = each["error"].splitlines()[-1] if speed is None else number(speed)
            rows.append([each["name"], words])
        lines += table(["peer", "rounds/s"], rows)
    return "\n".join(lines)
