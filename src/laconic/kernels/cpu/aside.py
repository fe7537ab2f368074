"""Old residuals put aside past the cache: nobody reads them unless a step is taken back.

What is written the usual way is read first, and drives out of the cache what is still needed there.
"""

import numpy as np
from numpy.typing import NDArray

from laconic.kernels.cpu.jit import called
from laconic.kernels.cpu.vector import LANES, LINE_BYTES, stream

FLOAT_BYTES = 4


@called
def put_aside(old: NDArray[np.float32], aside: NDArray[np.float32]) -> None:
    """Copies a block; `written` must follow the last one."""
    # Only whole lines of memory can be written past the cache.
    first = min(old.size, (-aside.ctypes.data % LINE_BYTES) // FLOAT_BYTES)
    whole = first + (old.size - first) // LANES * LANES
    for i in range(first):
        aside[i] = old[i]
    for i in range(first, whole, LANES):
        stream(aside, i, old, i)
    for i in range(whole, old.size):
        aside[i] = old[i]
