"""All rows and states in the memory of one device."""

import jax

from fedjaxsim.data.population import Population
from fedjaxsim.engine.placement import Functions, jitted
from fedjaxsim.engine.program import Program
from fedjaxsim.engine.rows import Rows


class InMemory:
    """All rows and states in the memory of the first device."""

    def rows(self, population: Population) -> dict[str, Rows]:
        """As of `Placement`."""
        with jax.ensure_compile_time_eval():  # also where a run is being traced
            fields = {name: jax.device_put(value) for name, value in population.fields.items()}
            return {split: Rows.place(population, split, fields) for split in population.splits}

    def compiled(self, program: Program) -> Functions:
        """As of `Placement`."""
        return jitted(Functions(program.init, program.round, program.rounds, program.evaluate))
