"""What a round is made of: state, program, placement over devices, evaluation."""
