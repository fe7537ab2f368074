"""The TensorFlow backend: tensors are exchanged with torch by DLPack, eagerly or inside a graph."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from torch import Tensor

from gradwire.errors import ConfigError
from gradwire.integrations.keras.backend import F, Framework, Work

ALIGNED_BYTES = 64
"""Alignment of TensorFlow's tensors; it aborts the process on others."""


class TensorFlow(Framework):
    """Keras on TensorFlow, or TensorFlow alone; gradients are encoded on the host."""

    def check(self) -> None:
        if tf.distribute.has_strategy():
            raise ConfigError(
                "gradwire.keras: gradients would be averaged by tf.distribute, too; make the model "
                "outside of any strategy's scope"
            )
        if not tf.executing_eagerly() and GraphOrParentsInXlaContext(
            tf.compat.v1.get_default_graph()
        ):
            raise ConfigError(
                "gradwire.keras: XLA cannot wait for other ranks; set jit_compile=False in "
                "model.compile or tf.function"
            )

    def without_autograph(self, function: F) -> F:
        plain: F = tf.autograph.experimental.do_not_convert(function)
        return plain

    def device(self, variable: Any) -> torch.device:
        return torch.device("cpu")

    def dense(self, gradient: Any) -> Any:
        return tf.convert_to_tensor(gradient)

    def zeros_like(self, variable: Any) -> Any:
        return tf.zeros(variable.shape, variable.dtype)

    def values(self, variables: Sequence[Any]) -> list[Tensor]:
        with tf.init_scope(), tf.device("cpu"):
            return [_to_torch(tf.convert_to_tensor(variable)) for variable in variables]

    def apply_work(self, work: Work, gradients: Sequence[Any], scale: Any) -> list[Any]:
        def run_work(scale: Any, *given: Any) -> list[Any]:
            means = work([_to_torch(gradient) for gradient in given], float(scale))
            return [_from_torch(mean) for mean in means]

        with tf.device("cpu"):
            if tf.executing_eagerly():
                return run_work(scale, *[tf.identity(gradient) for gradient in gradients])
            types = [gradient.dtype for gradient in gradients]
            means: list[Any] = tf.py_function(
                self.without_autograph(run_work), [scale, *gradients], types
            )
        for mean, gradient in zip(means, gradients, strict=True):
            mean.set_shape(gradient.shape)
        return means


def _to_torch(tensor: Any) -> Tensor:
    """Returns a torch view of the tensor, to be read only: TensorFlow may share its memory."""
    return torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))


def _from_torch(tensor: Tensor) -> Any:
    """Hands the tensor's memory over to TensorFlow; copies it if it is not aligned."""
    if tensor.data_ptr() % ALIGNED_BYTES:
        tensor = tensor.clone()
    return tf.experimental.dlpack.from_dlpack(tensor.__dlpack__())
