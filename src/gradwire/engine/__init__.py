"""The engine: runs the compressors, memories and exchanges of a model's parameters on one rank."""
