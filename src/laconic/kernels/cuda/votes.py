"""Signs as votes (the meaning: kernels/reference/votes.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.cuda.random import KEYS, halves
from laconic.kernels.cuda.sums import BLOCK, PROGRAMS, pack_words
from laconic.kernels.cuda.words import word_at
from laconic.types import Key


@triton.jit(do_not_specialize=KEYS)
def _votes_kernel(
    x_ptr, words_ptr, say_ptr, numel, key_low, key_high, BLOCK: tl.constexpr
):  # fmt: skip
    largest = tl.zeros((BLOCK,), tl.int32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < numel:
        place = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + place, mask=place < numel, other=1.0)
        at = start // 32 + tl.arange(0, BLOCK // 32)
        coins = word_at(at, key_low, key_high).to(tl.int32, bitcast=True)
        words = pack_words(x < 0, BLOCK // 32) | (pack_words(x == 0, BLOCK // 32) & coins)
        tl.store(words_ptr + at, words, mask=at * 32 < numel)
        bits = tl.where(place < numel, tl.abs(x).to(tl.int32, bitcast=True), 0)
        largest = tl.maximum(largest, bits)
        start += tl.num_programs(0) * BLOCK
    # The bits of 0, 1 and NaN, which ascend.
    peak = tl.max(largest)
    say = tl.where(peak >= 0x7F800000, 0x7FC00000, tl.where(peak > 0, 0x3F800000, 0))
    tl.atomic_max(say_ptr, say)


def votes_pack(x: Tensor, key: Key) -> tuple[Tensor, Tensor]:
    numel = x.numel()
    words = torch.empty(-(-numel // 32), dtype=torch.int32, device=x.device)
    say = torch.zeros(1, dtype=torch.int32, device=x.device)
    blocks = -(-numel // BLOCK)
    programs = min(PROGRAMS, blocks)
    if numel:
        _votes_kernel[(programs,)](x, words, say, numel, *halves(key), BLOCK=BLOCK)
    return words.view(torch.uint8)[: -(-numel // 8)], say.view(torch.float32)
