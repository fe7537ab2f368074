"""Compression that sets itself: one controller a file."""
