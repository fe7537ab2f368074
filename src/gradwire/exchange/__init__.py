"""Exchanges: one a file, and the file name is the name in specs."""
