"""What a command does before the first computation, and how programs end."""

INTERRUPTED = 130
"""The exit code of a program that Ctrl-C ended."""


def start_jax() -> None:
    """Imports JAX and sets it up as a program wants it; to be called before it computes."""
    from fedjaxsim.cli.compiled import keep_compiled_programs
    from fedjaxsim.engine.sharding import use_all_cores

    use_all_cores()
    keep_compiled_programs()
