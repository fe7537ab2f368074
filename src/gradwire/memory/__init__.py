"""Memories, which keep what was not sent: one per file, named after the file."""
