"""Reference backend: every kernel in plain torch, on any device. It defines the other backends."""

from gradwire.kernels.exports import collect
from gradwire.kernels.reference.composed import compose

globals().update(collect(__name__, compose(__name__)))
