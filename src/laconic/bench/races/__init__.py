"""Benchmarks on emulated hosts: training, step times and guards, one case after the other."""
