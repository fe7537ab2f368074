"""Training with simulated workers in one process, with exact bytes and a predicted clock."""
