"""Shared parts of the workloads on CIFAR-10 and CIFAR-100: data, loss, optimiser and accuracy.

Images are flipped and shifted anew in every epoch: cropped from a frame of 4 black pixels (He et
al. 2015), on the device and for a whole batch at once. `Flat` joins the parameters of a model into
two vectors, so that a method selects among all layers and makes few calls.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, pad
from torch.optim import SGD, Optimizer

from gradwire.bench.datasets import cifar100
from gradwire.bench.datasets.cifar10 import (
    CIFAR10,
    CLASSES,
    SIDE,
    ImageSplits,
    read_cifar10,
    synthetic_images,
)
from gradwire.bench.datasets.sampling import (
    BatchSlice,
    batch_slice,
    merge_slices,
    random_integers,
    random_permutation,
)
from gradwire.bench.workloads.base import Batch, Evaluation, Metric, Workload, evaluating
from gradwire.engine.plan import Plan

_SMALL = Plan.min_numel


class Flat(nn.Module):
    """Wraps a model whose parameters become two vectors: `wide`, which is compressed, and `rest`.

    A method then selects among all layers instead of within each.
    """

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        named = {name: p.detach() for name, p in model.named_parameters()}
        self._shapes = {name: p.shape for name, p in named.items()}
        self._wide = [n for n, p in named.items() if p.dim() > 1 and p.numel() >= _SMALL]
        self._narrow = [name for name in named if name not in self._wide]
        # One row, since parameters of one dimension are sent dense.
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
        # One split: with slices, every slice would have a gradient as long as the vector.
        pieces = vector.split([self._shapes[name].numel() for name in names])
        pairs = zip(names, pieces, strict=True)
        return {name: piece.view(self._shapes[name]) for name, piece in pairs}


def _joined(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    first = next(iter(tensors.values()))
    return torch.cat([first.new_empty(0), *(tensors[name].flatten() for name in names)])


ImageSet: TypeAlias = Literal["cifar10", "cifar100"]

_PADDING = 4
_STATS: Mapping[ImageSet, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
"""Mean and deviation of every channel."""
_EVAL_BATCH = 500


class Epoch(NamedTuple):
    """The order of the training images in an epoch, and the augmentation of each."""

    order: Tensor
    flip: Tensor
    top: Tensor
    left: Tensor


@dataclass(frozen=True)
class ImageWorkload(Workload):
    """A classifier of images; the learning rate is that of 8 workers with 64 images each."""

    batch_size: int = 64
    learning_rate: float = 0.1
    weight_decay: float = 5e-4
    bf16: bool = False
    """True if the net runs under bfloat16 autocast; parameters and gradients stay float32."""
    flat: bool = False
    """True if all weights are one parameter, so that methods select among all layers."""
    images: ImageSet = "cifar10"
    metric: ClassVar = Metric("accuracy", "higher")
    source: ClassVar = CIFAR10

    @property
    def classes(self) -> int:
        return CLASSES if self.images == "cifar10" else cifar100.CLASSES

    @property
    def images_title(self) -> str:
        return "CIFAR-10" if self.images == "cifar10" else "CIFAR-100"

    @abstractmethod
    def net(self) -> nn.Module:
        """Builds the model, initialised from torch's global generator."""

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
        return len(self._splits().training.classes)

    def batch(self, step: int, rank: int, workers: int, seed: int) -> Batch:
        count = len(self._splits().training.classes)
        return self._batch_of(seed, batch_slice(count, self.batch_size, step, rank, workers))

    def batches(self, step: int, workers: int, seed: int) -> Batch:
        """Builds all batches at once, since those of a step are adjacent in the epoch's order."""
        count = len(self._splits().training.classes)
        each = [batch_slice(count, self.batch_size, step, rank, workers) for rank in range(workers)]
        parts = [self._batch_of(seed, part) for part in merge_slices(each)]
        return parts[0] if len(parts) == 1 else Batch(*map(torch.cat, zip(*parts, strict=True)))

    def _batch_of(self, seed: int, part: BatchSlice) -> Batch:
        images = self._splits().training
        whole = _epoch(len(images.classes), seed, part.epoch, self.device)
        epoch = Epoch(*(item[part.start : part.stop] for item in whole))
        pixels = _augmented(images.pixels[epoch.order], epoch, self.images)
        return Batch(pixels, images.classes[epoch.order])

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(output, targets)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Evaluates on all test images, without augmentation."""
        images = self._splits().held_out
        loss = right = torch.zeros((), dtype=torch.float64, device=self.device)
        with evaluating(model):
            for pixels, classes in zip(*(item.split(_EVAL_BATCH) for item in images), strict=True):
                output = model(_normalized(pixels, self.images))
                loss = loss + self.loss(output, classes) * len(classes)
                right = right + (output.argmax(1) == classes).sum()
        count = len(images.classes)
        return Evaluation(float(loss) / count, self.metric.name, float(right) / count)

    def _splits(self) -> ImageSplits:
        if self.synthetic:
            return synthetic_images(self.device, self.classes)
        if self.images == "cifar100":
            return cifar100.read_cifar100(self.data, self.device)
        return read_cifar10(self.data, self.device)


# The ranks of one step may be in two epochs.
@lru_cache(maxsize=2)
def _epoch(count: int, seed: int, epoch: int, device: str) -> Epoch:
    shifts = 2 * _PADDING + 1
    return Epoch(
        random_permutation(count, device, seed, epoch, 0),
        random_integers(2, count, device, seed, epoch, 1).bool(),
        random_integers(shifts, count, device, seed, epoch, 2),
        random_integers(shifts, count, device, seed, epoch, 3),
    )


def _augmented(pixels: Tensor, epoch: Epoch, images: ImageSet = "cifar10") -> Tensor:
    framed = pad(pixels, [_PADDING] * 4)
    place = torch.arange(SIDE, device=pixels.device)
    rows = epoch.top[:, None] + place  # [images, 32]
    columns = epoch.left[:, None] + torch.where(epoch.flip[:, None], place.flip(0), place)
    image = torch.arange(len(pixels), device=pixels.device)[:, None, None, None]
    channel = torch.arange(3, device=pixels.device)[:, None, None]
    shifted = framed[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
    return _normalized(shifted, images)


def _normalized(pixels: Tensor, images: ImageSet = "cifar10") -> Tensor:
    """Scales every channel to mean 0 and variance 1 over all images."""
    mean, deviation = _channel_stats(pixels.device, images)
    return (pixels.float() / 255 - mean) / deviation


@cache
def _channel_stats(device: torch.device, images: ImageSet) -> tuple[Tensor, Tensor]:
    """Returns mean and deviation, cached on the device: the copy takes longer than their use."""
    mean, deviation = torch.tensor(_STATS[images], device=device).view(2, 3, 1, 1)
    return mean, deviation


class _Bf16(nn.Module):
    """Runs a net under bfloat16 autocast, with images in the channels-last layout."""

    def __init__(self, net: nn.Module) -> None:
        nn.Module.__init__(self)
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16):
            output: Tensor = self.net(images.contiguous(memory_format=torch.channels_last))
        return output.float()
