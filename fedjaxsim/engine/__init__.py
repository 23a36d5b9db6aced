"""The engine: programs and their transforms, the parts of a round, state, loop, evaluation."""
