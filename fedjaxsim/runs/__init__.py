"""Settings of runs, and their checks, execution and files: shared by the commands."""
