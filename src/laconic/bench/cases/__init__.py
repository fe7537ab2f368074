"""What takes part in a benchmark: methods of ours by their specs, and baselines by their names."""
