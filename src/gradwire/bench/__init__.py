"""Benchmarks: train and time workloads, keep the results as records and report them."""
