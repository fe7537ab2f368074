"""Cases that a benchmark compares: our methods by their specs, and baselines by their names."""
