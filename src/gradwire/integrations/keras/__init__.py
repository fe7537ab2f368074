"""Keras 3 and TensorFlow over a torch process group; public as `gradwire.keras`."""
