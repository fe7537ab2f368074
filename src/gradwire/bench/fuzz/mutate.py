"""Mutations of a message, accidental or hostile."""

import random
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
Mutation: TypeAlias = Callable[[Bytes, Bytes, random.Random], Bytes]
"""A message, another one that is as good, and dice; returns the bytes that arrive instead."""

WORD = 4
"""Fields begin at multiples of it, lengths and counts are as long."""

NUMBERS = (0, 1, -1, 2, 255, 256, 65535, 65536, 2**24, 2**30, 2**31 - 2, 2**31 - 1, -(2**31))
FLOATS = (np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -0.0)


def flip_bits(message: Bytes, other: Bytes, dice: random.Random) -> Bytes:
    out = np.array(message)
    for _ in range(dice.choice((1, 1, 2, 8)) if out.size else 0):
        out[dice.randrange(out.size)] ^= np.uint8(1 << dice.randrange(8))
    return out


def scribble(message: Bytes, other: Bytes, dice: random.Random) -> Bytes:
    """A stretch becomes noise."""
    out = np.array(message)
    start = dice.randrange(out.size + 1)
    stop = min(out.size, start + dice.choice((1, 4, 16, 256)))
    out[start:stop] = _noise(stop - start, dice)
    return out


def all_noise(message: Bytes, other: Bytes, dice: random.Random) -> Bytes:
    return _noise(message.size, dice)


def hostile_number(message: Bytes, other: Bytes, dice: random.Random) -> Bytes:
    """A word, often one of the first, where lengths and counts are, becomes a hostile number."""
    out = np.array(message)
    words = out[: out.size // WORD * WORD].view(np.int32)
    if words.size:
        place = dice.randrange(min(words.size, dice.choice((1, 4, words.size))))
        was = int(words[place])
        value = dice.choice((*NUMBERS, was + 1, was - 1, was * 2, was + 4))
        words[place] = (value + 2**31) % 2**32 - 2**31
    return out


def hostile_float(message: Bytes, other: Bytes, dice: random.Random) -> Bytes:
    out = np.array(message)
    words = out[: out.size // WORD * WORD].view(np.float32)
    if words.size:
        words[dice.randrange(words.size)] = dice.choice(FLOATS)
    return out


def swap_words(message: Bytes, other: Bytes, dice: random.Random) -> Bytes:
    """Two words change places, such as two lengths."""
    out = np.array(message)
    words = out[: out.size // WORD * WORD].view(np.int32)
    if words.size:
        one, two = (dice.randrange(min(words.size, dice.choice((4, 4096)))) for _ in range(2))
        words[one], words[two] = words[two], words[one]
    return out


def cut(message: Bytes, other: Bytes, dice: random.Random) -> Bytes:
    less = dice.choice((1, WORD, dice.randrange(message.size + 1)))
    return np.array(message[: max(0, message.size - less)])


def grow(message: Bytes, other: Bytes, dice: random.Random) -> Bytes:
    more = dice.choice((1, WORD, 2 * WORD, 64, message.size))
    return np.concatenate([message, _noise(more, dice)])


def noise_of_any_length(message: Bytes, other: Bytes, dice: random.Random) -> Bytes:
    return _noise(dice.randrange(2 * message.size + 2 * WORD), dice)


def splice(message: Bytes, other: Bytes, dice: random.Random) -> Bytes:
    """The beginning of one and the end of another, cut between words."""
    place = dice.randrange(message.size // WORD + 1) * WORD
    return np.concatenate([message[:place], other[place:]])


def stranger(message: Bytes, other: Bytes, dice: random.Random) -> Bytes:
    """A good message, but one to somebody else."""
    return np.array(other)


def _noise(count: int, dice: random.Random) -> Bytes:
    return np.frombuffer(dice.randbytes(count), dtype=np.uint8)


SAME_LENGTH: tuple[Mutation, ...] = (
    flip_bits,
    scribble,
    all_noise,
    hostile_number,
    hostile_float,
    swap_words,
)
"""All that can happen to an answer whose room the receiver itself has made."""

ANY_LENGTH: tuple[Mutation, ...] = (
    *SAME_LENGTH,
    *SAME_LENGTH,
    cut,
    grow,
    noise_of_any_length,
    splice,
    stranger,
)
