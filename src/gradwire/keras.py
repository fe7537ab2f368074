"""Keras and TensorFlow: `gradwire.keras.DistributedOptimizer` and `DistributedGradientTape`."""

from importlib.util import find_spec

from gradwire.errors import MissingExtra

if find_spec("keras") is None:
    raise MissingExtra("gradwire.keras", "keras", "tf")

from gradwire.integrations.keras.distributed import DistributedGradientTape, DistributedOptimizer
from gradwire.integrations.keras.reducer import Reducer

__all__ = ["DistributedGradientTape", "DistributedOptimizer", "Reducer"]
