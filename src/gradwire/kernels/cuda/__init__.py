"""CUDA backend, compiled by Triton: fused kernels with the results of kernels/reference.

No kernel synchronizes the host with the device, except `select_above` and `select_by_threshold`,
which return tensors of a data-dependent length; `encode_by_threshold` leaves the count on the
device.
"""

from gradwire.kernels.exports import collect

globals().update(collect(__name__))
