"""ResNet-101 for small images: bottleneck blocks (He et al. 2015) with the stem of `resnet18`."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import relu

from gradwire.bench.workloads import _schedules as schedules
from gradwire.bench.workloads._images import ImageWorkload
from gradwire.bench.workloads.resnet18 import convolution
from gradwire.errors import ConfigError

_BLOCKS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks of each stage, by the number of layers."""
_EXPANSION = 4


@dataclass(frozen=True)
class ResNet101(ImageWorkload):
    """Four stages of bottleneck blocks, `depth` layers; 42.5 million parameters by default."""

    depth: int = 101
    width: int = 64
    tiny: ClassVar = "synthetic=true,depth=26,width=4,batch_size=16"

    def __post_init__(self) -> None:
        ImageWorkload.__post_init__(self)
        if self.depth not in _BLOCKS:
            raise ConfigError(f"resnet101: depth must be one of {[*_BLOCKS]}, got {self.depth}")

    @property
    def title(self) -> str:
        return f"ResNet-{self.depth} on {self.images_title}"

    def net(self) -> nn.Module:
        layers: list[nn.Module] = [*convolution(3, self.width, 3), nn.ReLU()]
        inputs = self.width
        for stage, blocks in enumerate(_BLOCKS[self.depth]):
            inner = self.width << stage
            for block in range(blocks):
                layers.append(_Bottleneck(inputs, inner, 2 if stage and not block else 1))
                inputs = _EXPANSION * inner
        end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, self.classes))
        return nn.Sequential(*layers, *end)

    def learning_rate_at(self, progress: float) -> float:
        return self.learning_rate * schedules.cosine(progress, warm=0.1)


class _Bottleneck(nn.Module):
    """A residual block of three convolutions, the middle one of which has `inner` channels."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        nn.Module.__init__(self)
        outputs = _EXPANSION * inner
        self.body = nn.Sequential(
            *convolution(inputs, inner, 1),
            nn.ReLU(),
            *convolution(inner, inner, 3, stride),
            nn.ReLU(),
            *convolution(inner, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Sequential(*([] if same else convolution(inputs, outputs, 1, stride)))

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.body(x)
        shortcut: Tensor = self.shortcut(x)
        return relu(change + shortcut)
