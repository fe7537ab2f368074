"""The convergence studies: what they train, and all their runs until time is up."""
