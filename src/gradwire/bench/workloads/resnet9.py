"""ResNet-9 on CIFAR-10: the net of fast training runs, wide and shallow (Page 2018)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from gradwire.bench.workloads import _schedules as schedules
from gradwire.bench.workloads._images import ImageWorkload

# Scales the last layer's output down, so that the initial loss is near that of chance.
_SCALE = 0.125


@dataclass(frozen=True)
class ResNet9(ImageWorkload):
    """Four stages, a residual block after the second and the fourth; 6.6 million parameters."""

    learning_rate: float = 0.4
    width: int = 64
    tiny: ClassVar = "synthetic=true,width=4,batch_size=16"

    @property
    def title(self) -> str:
        return f"ResNet-9 on {self.images_title}"

    def net(self) -> nn.Module:
        return nn.Sequential(
            _stage(3, self.width),
            _stage(self.width, 2 * self.width, pool=True),
            _Residual(2 * self.width),
            _stage(2 * self.width, 4 * self.width, pool=True),
            _stage(4 * self.width, 8 * self.width, pool=True),
            _Residual(8 * self.width),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(8 * self.width, self.classes, bias=False),
            _Times(_SCALE),
        )

    def learning_rate_at(self, progress: float) -> float:
        return self.learning_rate * schedules.triangle(progress, top=0.2)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        self.body = nn.Sequential(_stage(width, width), _stage(width, width))

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.body(x)
        return x + change


class _Times(nn.Module):
    def __init__(self, factor: float) -> None:
        nn.Module.__init__(self)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _stage(inputs: int, outputs: int, pool: bool = False) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))
