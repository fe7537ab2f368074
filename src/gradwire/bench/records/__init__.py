"""Records of measurements: their schema, files of them, and comparisons between them."""
