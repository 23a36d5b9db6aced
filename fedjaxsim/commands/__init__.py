"""Work of each command, as functions of plain arguments; `fedjaxsim.cli` has the flags."""
