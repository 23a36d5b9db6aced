"""What each command does, as functions of plain arguments; flags are in `fedjaxsim.cli`."""
