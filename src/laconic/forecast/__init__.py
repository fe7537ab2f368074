"""What a step will cost on a cluster that need not be there: rehearsed, probed and put together."""
