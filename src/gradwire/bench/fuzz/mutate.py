"""Mutations of a message, accidental or hostile."""

import random
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
Mutation: TypeAlias = Callable[[Bytes, Bytes, random.Random], Bytes]
"""Takes a message, another valid one, and random numbers; returns the bytes that arrive instead."""

WORD = 4
"""Bytes of lengths and counts; fields begin at multiples of it."""

NUMBERS = (0, 1, -1, 2, 255, 256, 65535, 65536, 2**24, 2**30, 2**31 - 2, 2**31 - 1, -(2**31))
FLOATS = (np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -0.0)


def flip_bits(message: Bytes, other: Bytes, rng: random.Random) -> Bytes:
    out = np.array(message)
    for _ in range(rng.choice((1, 1, 2, 8)) if out.size else 0):
        out[rng.randrange(out.size)] ^= np.uint8(1 << rng.randrange(8))
    return out


def overwrite_stretch(message: Bytes, other: Bytes, rng: random.Random) -> Bytes:
    """Overwrites a stretch with noise."""
    out = np.array(message)
    start = rng.randrange(out.size + 1)
    stop = min(out.size, start + rng.choice((1, 4, 16, 256)))
    out[start:stop] = _noise(stop - start, rng)
    return out


def all_noise(message: Bytes, other: Bytes, rng: random.Random) -> Bytes:
    return _noise(message.size, rng)


def hostile_number(message: Bytes, other: Bytes, rng: random.Random) -> Bytes:
    """Replaces a word by a hostile number; often one of the first, where lengths and counts are."""
    out = np.array(message)
    words = out[: out.size // WORD * WORD].view(np.int32)
    if words.size:
        index = rng.randrange(min(words.size, rng.choice((1, 4, words.size))))
        was = int(words[index])
        value = rng.choice((*NUMBERS, was + 1, was - 1, was * 2, was + 4))
        words[index] = (value + 2**31) % 2**32 - 2**31
    return out


def hostile_float(message: Bytes, other: Bytes, rng: random.Random) -> Bytes:
    out = np.array(message)
    words = out[: out.size // WORD * WORD].view(np.float32)
    if words.size:
        words[rng.randrange(words.size)] = rng.choice(FLOATS)
    return out


def swap_words(message: Bytes, other: Bytes, rng: random.Random) -> Bytes:
    """Swaps two words, such as two lengths."""
    out = np.array(message)
    words = out[: out.size // WORD * WORD].view(np.int32)
    if words.size:
        one, two = (rng.randrange(min(words.size, rng.choice((4, 4096)))) for _ in range(2))
        words[one], words[two] = words[two], words[one]
    return out


def cut(message: Bytes, other: Bytes, rng: random.Random) -> Bytes:
    less = rng.choice((1, WORD, rng.randrange(message.size + 1)))
    return np.array(message[: max(0, message.size - less)])


def grow(message: Bytes, other: Bytes, rng: random.Random) -> Bytes:
    more = rng.choice((1, WORD, 2 * WORD, 64, message.size))
    return np.concatenate([message, _noise(more, rng)])


def noise_of_any_length(message: Bytes, other: Bytes, rng: random.Random) -> Bytes:
    return _noise(rng.randrange(2 * message.size + 2 * WORD), rng)


def splice(message: Bytes, other: Bytes, rng: random.Random) -> Bytes:
    """Joins the beginning of one message and the end of another, cut between words."""
    index = rng.randrange(message.size // WORD + 1) * WORD
    return np.concatenate([message[:index], other[index:]])


def other_message(message: Bytes, other: Bytes, rng: random.Random) -> Bytes:
    """Returns a valid message of another injection point."""
    return np.array(other)


def _noise(count: int, rng: random.Random) -> Bytes:
    return np.frombuffer(rng.randbytes(count), dtype=np.uint8)


SAME_LENGTH: tuple[Mutation, ...] = (
    flip_bits,
    overwrite_stretch,
    all_noise,
    hostile_number,
    hostile_float,
    swap_words,
)
"""Mutations of an answer whose buffer the receiver itself has allocated."""

ANY_LENGTH: tuple[Mutation, ...] = (
    *SAME_LENGTH,
    *SAME_LENGTH,
    cut,
    grow,
    noise_of_any_length,
    splice,
    other_message,
)
