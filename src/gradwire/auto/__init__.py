"""The automatic mode: chooses the method for this model on this link, from what it measures."""
