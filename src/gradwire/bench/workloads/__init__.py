"""Workloads that the benchmarks train, one per file; the file name is the workload's name.

`base` holds the interface and the registry; modules with a leading underscore hold shared parts.
"""
