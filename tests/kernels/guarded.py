"""Runs the compiled decoders on memory between guard pages, in a process that may crash.

Whatever a message holds, no loop reads or writes outside its arguments.
"""

import torch
from torch import Tensor

from gradwire.bench.fuzz.guard_pages import GuardedMemory
from gradwire.kernels import cpu
from gradwire.kernels.specs import RoundingKind, RoundingSpec
from gradwire.wire.bits import packed_numel
from gradwire.wire.indices import bitmap_bits, index_field, low_bits

GENERATOR = torch.Generator().manual_seed(0)
SIZES = (1, 2, 7, 8, 9, 63, 64, 65, 200, 1000)
A, B, C = (GuardedMemory(1 << 16) for _ in range(3))


def noise(count: int) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=GENERATOR)


def unpack_bits(numel: int, at_end: bool) -> int:
    for width in range(1, 20):
        cpu.unpack_bits(A.hold(noise(packed_numel(numel, width)), at_end=at_end), width, numel)
    return 19


def positions(numel: int, at_end: bool) -> int:
    """Decodes noise, which is seldom valid, and positions with a few flipped bits, often valid."""
    for count in {1, min(2, numel), numel // 10 or 1, numel // 2 or 1, numel}:
        nbytes = index_field(numel, count).numel
        assert nbytes is not None
        low, bits = low_bits(numel, count), bitmap_bits(numel, count)
        good = torch.randperm(numel, generator=GENERATOR)[:count].sort().values
        flipped = cpu.pack_index(good, low, bits)
        flipped[-1] ^= 1 << int(noise(1)) % 8
        for bytes_ in (noise(nbytes), noise(nbytes) & noise(nbytes) & noise(nbytes), flipped):
            packed = A.hold(bytes_, at_end=at_end)
            if cpu.index_fits(packed, low, bits, count, numel):
                index = cpu.unpack_index(packed, low, bits, count)
                assert int(index.min()) >= 0
                assert int(index.max()) < numel
                values = B.hold(noise(4 * count).view(torch.float32), at_end=at_end).view(1, -1)
                out = C.hold(torch.zeros(numel), at_end=at_end)
                cpu.add_packed(out, packed.unsqueeze(0), low, bits, values, 0.5)
    return 1


def signs(numel: int, at_end: bool) -> int:
    for rows in (1, 3):
        bits = A.hold(noise(rows * packed_numel(numel, 1)), at_end=at_end).view(rows, -1)
        scales = B.hold(noise(4 * rows).view(torch.float32), at_end=at_end).view(rows, 1)
        cpu.sign_add(C.hold(torch.zeros(numel), at_end=at_end), bits, scales, 0.5)
    return 2


def levels(numel: int, at_end: bool) -> int:
    specs = [
        RoundingSpec("stochastic", bucket, width)
        for width in range(2, 9)
        for bucket in (1, 5, 8, 128)
    ]
    kinds: tuple[RoundingKind, ...] = ("e4m3", "e5m2", "tree", "power")
    specs += [RoundingSpec(kind, bucket) for kind in kinds for bucket in (5, 128)]
    for spec in specs:
        buckets = -(-numel // spec.bucket)
        codes = A.hold(noise(2 * packed_numel(numel, spec.width)), at_end=at_end).view(2, -1)
        scales = B.hold(noise(8 * buckets).view(torch.float32), at_end=at_end).view(2, -1)
        out = C.hold(torch.zeros(numel), at_end=at_end)
        cpu.round_add(out, codes, scales, 0.5, spec)
    return len(specs)


def two_means(numel: int, at_end: bool) -> int:
    for bucket in (1, 5, 64, 2000):
        buckets = -(-numel // bucket)
        bits = A.hold(noise(2 * packed_numel(numel, 1)), at_end=at_end).view(2, -1)
        means = B.hold(noise(8 * buckets).view(torch.float32), at_end=at_end).view(2, -1)
        cpu.sign_means_add(
            C.hold(torch.zeros(numel), at_end=at_end), bits, means, means, 0.5, bucket
        )
    return 4


def trits(numel: int, at_end: bool) -> int:
    packed = A.hold(noise(2 * -(-numel // 5)), at_end=at_end).view(2, -1)
    scales = B.hold(noise(8).view(torch.float32), at_end=at_end).view(2, 1)
    cpu.trits_add(C.hold(torch.zeros(numel), at_end=at_end), packed, scales, 0.5)
    return 1


if __name__ == "__main__":
    calls = sum(
        loop(numel, at_end)
        for loop in (unpack_bits, positions, signs, levels, two_means, trits)
        for numel in SIZES
        for at_end in (True, False)
        for _ in range(3)
    )
    print(f"{calls} calls survived")
