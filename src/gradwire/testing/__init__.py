"""The conformance suite for compressors, memories, exchanges and controllers; needs no pytest.

`gradwire.testing.check(MyCompressor())` runs all of it. With pytest, the plug-in of this folder
makes one test of each property.
"""

from gradwire.testing.case import Case, ConformanceError, run_step
from gradwire.testing.conformance import Item, Property, check, properties

__all__ = [
    "Case",
    "ConformanceError",
    "Item",
    "Property",
    "check",
    "properties",
    "run_step",
]
