"""VGG-16 on CIFAR-10 (Simonyan and Zisserman 2014), with batch norm and one layer at the end."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from gradwire.bench.workloads import _schedules as schedules
from gradwire.bench.workloads._images import ImageWorkload

# Convolutions of each stage, and their width as a multiple of the first.
_STAGES = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))


@dataclass(frozen=True)
class Vgg16(ImageWorkload):
    """13 convolutions in five stages; 14.7 million parameters by default."""

    learning_rate: float = 0.1
    width: int = 64
    tiny: ClassVar = "synthetic=true,width=4,batch_size=16"

    @property
    def title(self) -> str:
        return f"VGG-16 on {self.images_title}"

    def net(self) -> nn.Module:
        layers: list[nn.Module] = []
        inputs = 3
        for convolutions, factor in _STAGES:
            outputs = self.width * factor
            for _ in range(convolutions):
                layers += [
                    nn.Conv2d(inputs, outputs, 3, padding=1),
                    nn.BatchNorm2d(outputs),
                    nn.ReLU(),
                ]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs, self.classes))

    def learning_rate_at(self, progress: float) -> float:
        return self.learning_rate * schedules.cosine(progress, warm=0.1)
