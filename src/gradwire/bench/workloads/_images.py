"""Shared parts of the CIFAR-10 workloads: data, augmentation, loss, optimiser and accuracy.

Images are flipped and shifted anew in every epoch: cropped from a frame of 4 black pixels (He et
al. 2015), on the device and for a whole batch at once. `Flat` joins the parameters of a model into
two vectors, so that a method selects among all layers and makes few calls.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, pad
from torch.optim import SGD, Optimizer

from gradwire.bench.datasets.cifar10 import CIFAR10, SIDE, Pictures, read_cifar10, synthetic_cifar10
from gradwire.bench.datasets.sampling import Deal, deal, joined, numbers_below, shuffled
from gradwire.bench.workloads.base import Batch, Evaluation, Metric, Workload, evaluating
from gradwire.engine.plan import Plan

_SMALL = Plan.min_numel


class Flat(nn.Module):
    """The same function with the parameters `wide`, all that a plan compresses, and `rest`.

    A method then chooses among all layers instead of in each.
    """

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        named = {name: p.detach() for name, p in model.named_parameters()}
        self._shapes = {name: p.shape for name, p in named.items()}
        self._wide = [n for n, p in named.items() if p.dim() > 1 and p.numel() >= _SMALL]
        self._narrow = [name for name in named if name not in self._wide]
        # Of one row, since what has one dimension travels dense.
        self.wide = nn.Parameter(_joined(named, self._wide)[None])
        self.rest = nn.Parameter(_joined(named, self._narrow))
        for name in named:
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, None)
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        parts = {**self._cut(self.wide[0], self._wide), **self._cut(self.rest, self._narrow)}
        output: Tensor = functional_call(self.model, parts, (inputs,))
        return output

    def _cut(self, vector: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        # One split, since the gradient of each of many slices would be as long as the vector.
        pieces = vector.split([self._shapes[name].numel() for name in names])
        pairs = zip(names, pieces, strict=True)
        return {name: piece.view(self._shapes[name]) for name, piece in pairs}


def _joined(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    first = next(iter(tensors.values()))
    return torch.cat([first.new_empty(0), *(tensors[name].flatten() for name in names)])


_FRAME = 4
_MEAN = (0.4914, 0.4822, 0.4465)
_DEVIATION = (0.2470, 0.2435, 0.2616)
_AT_ONCE = 500


class Epoch(NamedTuple):
    """The order of the training images, and what is done to each of them."""

    order: Tensor
    flip: Tensor
    top: Tensor
    left: Tensor


@dataclass(frozen=True)
class PictureWorkload(Workload):
    """A classifier of CIFAR-10; the learning rate is that of 8 workers with 64 images each."""

    batch_size: int = 64
    learning_rate: float = 0.1
    weight_decay: float = 5e-4
    bf16: bool = False
    """Whether the net multiplies in bfloat16; parameters and gradients are float32 in any case."""
    flat: bool = False
    """Whether all weights are one parameter, so that methods choose among layers."""
    metric: ClassVar = Metric("accuracy", "higher")
    source: ClassVar = CIFAR10

    @abstractmethod
    def net(self) -> nn.Module:
        """The model, from torch's global generator."""

    def build(self) -> nn.Module:
        net = _Bf16(self.net()) if self.bf16 else self.net()
        return Flat(net) if self.flat else net

    def optimiser(self, model: nn.Module) -> Optimizer:
        return SGD(
            model.parameters(),
            lr=self.learning_rate,
            momentum=0.9,
            weight_decay=self.weight_decay,
            nesterov=True,
            fused=True if self.device == "cuda" else None,
        )

    def examples(self) -> int:
        return len(self._pictures().training.classes)

    def batch(self, step: int, rank: int, workers: int, seed: int) -> Batch:
        count = len(self._pictures().training.classes)
        return self._dealt(seed, deal(count, self.batch_size, step, rank, workers))

    def batches(self, step: int, workers: int, seed: int) -> Batch:
        """In one go, since workers take what lies side by side in the order of an epoch."""
        count = len(self._pictures().training.classes)
        each = [deal(count, self.batch_size, step, rank, workers) for rank in range(workers)]
        parts = [self._dealt(seed, part) for part in joined(each)]
        return parts[0] if len(parts) == 1 else Batch(*map(torch.cat, zip(*parts, strict=True)))

    def _dealt(self, seed: int, part: Deal) -> Batch:
        images = self._pictures().training
        whole = _epoch(len(images.classes), seed, part.epoch, self.device)
        epoch = Epoch(*(item[part.start : part.stop] for item in whole))
        return Batch(_varied(images.pixels[epoch.order], epoch), images.classes[epoch.order])

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(output, targets)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """On all test images, as they are."""
        images = self._pictures().held_out
        loss = right = torch.zeros((), dtype=torch.float64, device=self.device)
        with evaluating(model):
            for pixels, classes in zip(*(item.split(_AT_ONCE) for item in images), strict=True):
                output = model(_scaled(pixels))
                loss = loss + self.loss(output, classes) * len(classes)
                right = right + (output.argmax(1) == classes).sum()
        count = len(images.classes)
        return Evaluation(float(loss) / count, self.metric.name, float(right) / count)

    def _pictures(self) -> Pictures:
        if self.synthetic:
            return synthetic_cifar10(self.device)
        return read_cifar10(self.data, self.device)


# Ranks of one step may be on both sides of an epoch's end.
@lru_cache(maxsize=2)
def _epoch(count: int, seed: int, epoch: int, device: str) -> Epoch:
    shifts = 2 * _FRAME + 1
    return Epoch(
        shuffled(count, device, seed, epoch, 0),
        numbers_below(2, count, device, seed, epoch, 1).bool(),
        numbers_below(shifts, count, device, seed, epoch, 2),
        numbers_below(shifts, count, device, seed, epoch, 3),
    )


def _varied(pixels: Tensor, epoch: Epoch) -> Tensor:
    framed = pad(pixels, [_FRAME] * 4)
    place = torch.arange(SIDE, device=pixels.device)
    rows = epoch.top[:, None] + place  # [images, 32]
    columns = epoch.left[:, None] + torch.where(epoch.flip[:, None], place.flip(0), place)
    image = torch.arange(len(pixels), device=pixels.device)[:, None, None, None]
    channel = torch.arange(3, device=pixels.device)[:, None, None]
    return _scaled(framed[image, channel, rows[:, None, :, None], columns[:, None, None, :]])


def _scaled(pixels: Tensor) -> Tensor:
    """Mean 0 and variance 1 in every channel, over all images."""
    mean, deviation = _colours(pixels.device)
    return (pixels.float() / 255 - mean) / deviation


@cache
def _colours(device: torch.device) -> tuple[Tensor, Tensor]:
    """Kept on the device, where putting them takes longer than using them."""
    mean, deviation = torch.tensor([_MEAN, _DEVIATION], device=device).view(2, 3, 1, 1)
    return mean, deviation


class _Bf16(nn.Module):
    """A net that multiplies in bfloat16, and lays out images as the units for that like them."""

    def __init__(self, net: nn.Module) -> None:
        nn.Module.__init__(self)
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16):
            output: Tensor = self.net(images.contiguous(memory_format=torch.channels_last))
        return output.float()
