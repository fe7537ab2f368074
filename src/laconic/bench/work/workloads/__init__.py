"""What the bench trains, one workload a file; the file name is its name."""
