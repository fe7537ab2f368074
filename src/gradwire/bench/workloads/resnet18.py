"""ResNet-18 on CIFAR-10: the ImageNet net (He et al. 2015) with a stem for small images."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import relu

from gradwire.bench.workloads import _schedules as schedules
from gradwire.bench.workloads._images import ImageWorkload


@dataclass(frozen=True)
class ResNet18(ImageWorkload):
    """Four stages of two blocks; 11.2 million parameters by default."""

    learning_rate: float = 0.2
    width: int = 64
    tiny: ClassVar = "synthetic=true,width=4,batch_size=16"

    @property
    def title(self) -> str:
        return f"ResNet-18 on {self.images_title}"

    def net(self) -> nn.Module:
        widths = [self.width << stage for stage in range(4)]
        layers: list[nn.Module] = [*convolution(3, self.width, 3), nn.ReLU()]
        for before, width in zip([self.width, *widths], widths, strict=False):
            layers += [_Block(before, width), _Block(width, width)]
        end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], self.classes))
        return nn.Sequential(*layers, *end)

    def learning_rate_at(self, progress: float) -> float:
        return self.learning_rate * schedules.cosine(progress, warm=0.1)


class _Block(nn.Module):
    """A residual block; halves the image if it has more outputs than inputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        nn.Module.__init__(self)
        stride = 1 if inputs == outputs else 2
        self.body = nn.Sequential(
            *convolution(inputs, outputs, 3, stride), nn.ReLU(), *convolution(outputs, outputs, 3)
        )
        self.shortcut = nn.Sequential(
            *([] if stride == 1 else convolution(inputs, outputs, 1, stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.body(x) + self.shortcut(x))


def convolution(inputs: int, outputs: int, side: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, side, stride=stride, padding=side // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]
