"""Hostile and broken bytes for every decoder: what must come out is a gradient or a WireError."""
