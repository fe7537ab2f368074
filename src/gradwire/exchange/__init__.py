"""How messages become a mean: one exchange a file, and the file's name is its name."""
