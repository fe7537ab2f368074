"""Fuzzing of every decoder: the result must be a gradient or a WireError."""
