"""`fedjaxsim audit`."""

import dataclasses
from collections.abc import Callable

from tyro.conf import OmitArgPrefixes

from fedjaxsim.cli.shared_flags import ConfigFile, Machines, WithSettings
from fedjaxsim.privacy.hypothetical import OptionalInt
from fedjaxsim.runs.settings import RunConfig


@dataclasses.dataclass(frozen=True)
class Audit(WithSettings):
    """Attack simulations with canaries; the exit code is 1 if that refutes the reported ε."""

    settings: OmitArgPrefixes[RunConfig]
    config: ConfigFile = None
    """TOML file with the same settings; flags win over it."""
    canaries: OptionalInt = None
    """n, clients of each run that are canaries; half of the possible number by default."""
    runs: int = 20
    """Number of runs; time grows with it, and power with n times it."""
    confidence: float = 0.99
    """Least probability that a sound simulation is not refuted."""
    json: bool = False
    """Print JSON instead of text."""

    def prepare(self) -> Callable[[], int]:
        """Audit; return a function that prints the result and gives the exit code."""
        Machines().start()
        from fedjaxsim.commands.audit import prepare_audit

        return prepare_audit(self.settings, self.canaries, self.runs, self.confidence, self.json)
