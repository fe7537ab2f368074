"""Predicted step times: `gradwire simulate`, `gradwire advise`, and their validation."""
