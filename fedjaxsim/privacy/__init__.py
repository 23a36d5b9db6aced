"""Privacy: who takes part, the door all messages pass, and what it costs."""
