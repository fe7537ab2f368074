"""Microbenchmarks on one machine: kernels, steps with error feedback, and integrations."""
