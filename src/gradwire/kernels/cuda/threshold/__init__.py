"""Threshold and top-k selection on the device, without synchronizing with the host.

Order of the launches: sampled_bounds, first_pass (histogram, subsample, spill_buffer), multistage,
refine, compaction, emit; solve computes the threshold at the end of a launch.
"""
