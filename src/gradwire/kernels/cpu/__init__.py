"""CPU backend, compiled by Numba: one pass over memory per kernel, without the GIL.

Large tensors are split among torch's threads (`threads.py`), with bitwise the same result as in one
thread. Compiled code is cached on disk beside this package, so only the first call on a machine
waits for the compiler.
"""

from gradwire.kernels.exports import Kernel, collect
from gradwire.kernels.reference.cast import cast_add
from gradwire.kernels.reference.composed import compose
from gradwire.kernels.reference.low_rank import orthonormal

# Inherited: torch already runs these at memory speed.
_inherited: dict[str, Kernel] = {"cast_add": cast_add, "orthonormal": orthonormal}

globals().update(collect(__name__, compose(__name__) | _inherited))
