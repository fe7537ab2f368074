"""What becomes of what was not sent: one memory a file, and the file's name is its name."""
