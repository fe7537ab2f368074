"""Fault injection: training jobs that are killed, stopped, cut off or fed corrupted data."""
