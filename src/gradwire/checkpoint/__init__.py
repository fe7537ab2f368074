"""Checkpoints: the state of an engine, files per rank, and states gathered from all ranks."""
