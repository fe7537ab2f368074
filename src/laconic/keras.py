"""Keras and TensorFlow: `laconic.keras.DistributedOptimizer` and `DistributedGradientTape`."""

from importlib.util import find_spec

from laconic.errors import MissingExtra

if find_spec("keras") is None:
    raise MissingExtra("laconic.keras", "keras", "tf")

from laconic.mount.keras import DistributedGradientTape, DistributedOptimizer
from laconic.mount.keras_reducer import Reducer

__all__ = ["DistributedGradientTape", "DistributedOptimizer", "Reducer"]
