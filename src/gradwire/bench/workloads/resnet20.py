"""ResNet-20 on CIFAR-10: the small net of the paper on residual learning (He et al. 2015)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import pad, relu

from gradwire.bench.workloads import _schedules as schedules
from gradwire.bench.workloads._images import ImageWorkload


@dataclass(frozen=True)
class ResNet20(ImageWorkload):
    """Three stages of `blocks` blocks; 0.27 million parameters by default."""

    learning_rate: float = 0.2
    weight_decay: float = 1e-4
    width: int = 16
    blocks: int = 3
    tiny: ClassVar = "synthetic=true,width=4,blocks=1,batch_size=16"

    @property
    def title(self) -> str:
        return f"ResNet-{6 * self.blocks + 2} on {self.images_title}"

    def net(self) -> nn.Module:
        width = self.width
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        for stage in range(3):
            for block in range(self.blocks):
                halves = stage > 0 and block == 0
                outputs = width << stage
                layers.append(_Block(outputs // 2 if halves else outputs, outputs))
        end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width << 2, self.classes))
        return nn.Sequential(*layers, *end)

    def learning_rate_at(self, progress: float) -> float:
        return self.learning_rate * schedules.stairs(progress, 0.03, 0.5, 0.75)


class _Block(nn.Module):
    """A residual block; halves the image if it has more outputs than inputs.

    The shortcut pads new channels with 0.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        nn.Module.__init__(self)
        self.stride = 1 if inputs == outputs else 2
        self.missing = outputs - inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=self.stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.body(x)
        shortcut = x[:, :, :: self.stride, :: self.stride]
        before = self.missing // 2
        return relu(change + pad(shortcut, [0, 0, 0, 0, before, self.missing - before]))
