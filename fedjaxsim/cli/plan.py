"""`fedjaxsim plan`: what a run needs, as the compiler of its devices says."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes

from fedjaxsim.cli.shared_flags import ConfigFile, Machines, WithSettings
from fedjaxsim.privacy.hypothetical import OptionalInt
from fedjaxsim.runs.fields import optional
from fedjaxsim.runs.settings import RunConfig

if TYPE_CHECKING:
    from fedjaxsim.engine.target import Target
    from fedjaxsim.runs.build import Experiment


@dataclasses.dataclass(frozen=True)
class Plan(WithSettings):
    """Compile a run, without running it, and print the memory that it needs.

    It reads the data; `--data random` gives any number of rows of any shape.
    """

    settings: OmitArgPrefixes[RunConfig]
    config: ConfigFile = None
    """TOML file with the same settings; flags win over it."""
    device: Annotated[
        Literal["h100", "a100", "v5e"] | None, optional("{h100,a100,v5e}", "this machine's")
    ] = None
    """Device to compile for, which need not be there; its compiler is an extra: cuda or tpu."""
    devices: OptionalInt = None
    """Number of devices; by default all of this machine, or one of another kind."""
    json: bool = False
    """Print JSON, in bytes."""

    def prepare(self) -> Callable[[], int]:
        """Compile; return a function that prints the table."""
        config = self.settings
        if config.out is not None:
            raise ValueError(f"out must not be given, as a plan writes no files, got {config.out}")
        if self.devices is not None and self.devices < 1:
            raise ValueError(f"devices must be at least 1, got {self.devices}")
        wanted = self.devices if self.device is None else None
        Machines("all" if wanted is None else str(wanted)).start()
        from fedjaxsim.engine.devices import require
        from fedjaxsim.engine.target import Target
        from fedjaxsim.report.files import print_json
        from fedjaxsim.runs.build import checked

        if self.device is None:
            require(wanted)
            target = Target.here()
        else:
            target = Target.named(self.device, self.devices or 1)
        experiment = checked(config)
        found = planned(experiment, target)

        def work() -> int:
            print_json(found) if self.json else _print(experiment, found)
            return 0

        return work


def planned(experiment: "Experiment", target: "Target") -> dict[str, Any]:
    """Return what a run needs on a target, in bytes, by name; compiles its programs.

    A CPU's devices use the memory of this process, which is measured: Python, JAX, the programs and
    the host's rows, in place of which a single device reads its own.
    """
    from fedjaxsim.engine.shape_bytes import bytes_of
    from fedjaxsim.engine.target import compile_for
    from fedjaxsim.runs.memory import host_bytes, private_bytes

    compiled = compile_for(target, experiment.simulation.setup, experiment.hparams)
    setup, need = compiled.setup, compiled.need
    number = len(setup.devices or (None,))
    parts = need._asdict() | {"process": 0, "host_states": 0}
    needs, has = need.peak, target.backend.memory
    if target.backend.platform == "cpu":
        rows = 0 if number == 1 and not setup.streamed else need.rows
        parts |= {"rows": rows, "process": private_bytes()}
        if setup.streamed:
            personal = experiment.state_shapes.personal, experiment.state_shapes.consumed
            parts["host_states"] = bytes_of(personal)
        needs = parts["process"] + parts["host_states"] + number * need._replace(rows=rows).peak
        has = host_bytes()
    return {
        "device": target.name,
        "devices": number,
        "placement": "streamed" if setup.streamed else "in memory",
        "clients": setup.num_clients,
        "cohort": setup.sampler.scheme.capacity,
        "chunk_size": compiled.chunk_size,
        "chunk_map": setup.layout.chunk_map,
        **parts,
        "needs": needs,
        "has": has,
        "fits": None if has is None else needs <= has,
    }


_WORDS = {
    "rows": "rows", "states": "personal states", "server": "the server's state",
    "rounds": "a program of rounds", "evaluation": "a program of an evaluation",
    "host_states": "all personal states, on the host",
    "process": "this process: Python, JAX, programs, data", "needs": "needs", "has": "has",
}  # fmt: skip


def _print(experiment: "Experiment", found: dict[str, Any]) -> None:
    from fedjaxsim.report.progress import bytes_text, print_rows

    print(
        f"{experiment.title}: {found['clients']:,} clients, cohorts of up to {found['cohort']:,}, "
        f"{found['chunk_size']} at once ({found['chunk_map']})"
    )
    one = (
        found["device"]
        if found["devices"] == 1
        else f"each of {found['devices']} {found['device']}"
    )
    rows = [(words, bytes_text(found[name])) for name, words in _WORDS.items() if found[name]]
    print_rows(("memory", f"{found['placement']}, {one}"), rows)
    if found["fits"] is not None:
        print("it fits" if found["fits"] else "it does not fit")
