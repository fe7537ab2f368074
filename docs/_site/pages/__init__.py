"""Documentation pages that are generated from the code and from its records."""
