"""Steps that nobody has taken yet: predictions, advice, and how near they are to measurements."""
