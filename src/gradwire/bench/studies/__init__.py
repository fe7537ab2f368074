"""The convergence studies: what they train, and a runner with a time limit."""
