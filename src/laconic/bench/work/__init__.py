"""What a benchmark trains: workloads, one a file in `workloads`, and what they share."""
