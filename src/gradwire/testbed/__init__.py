"""Emulated clusters: hosts with shaped links on one machine, and the workers that run on them."""
