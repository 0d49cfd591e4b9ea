"""Find which of the user's lines make what a step computes."""
