"""MovieLens-1M as pairs of user and film, with one rating of every user held out (He et al. 2017).

Reads GroupLens's ratings.dat and holds out every user's last rating beside 99 drawn films, or the
files of the authors of NCF, which list the held-out ratings: ml-1m.test.rating,
ml-1m.test.negative and ml-1m.train.rating (or ml-1m.implicit.npz: user, item, held_out).
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire.bench.datasets.sampling import numbers_below
from gradwire.bench.datasets.source import Source
from gradwire.kernels.reference.random import random_bits
from gradwire.types import mix

MOVIELENS = Source("MovieLens-1M", ("ml-1m",), "https://grouplens.org/datasets/movielens/1m/")
NEGATIVES = 99
_TEST_KEY = 6
_TEST = ("ml-1m.test.rating", "ml-1m.test.rating.gz")
_NEGATIVE = ("ml-1m.test.negative", "ml-1m.test.negative.gz")
_TRAINING = ("ml-1m.train.rating", "ml-1m.train.rating.gz", "ml-1m.implicit.npz")


class Sizes(NamedTuple):
    users: int
    items: int
    ratings: int


OFFICIAL = Sizes(6040, 3706, 1_000_209)
SYNTHETIC = Sizes(60, 140, 60 * 10)


class Ratings(NamedTuple):
    """Numbered users and items; row u of `candidates` is user u's held-out item and 99 others."""

    users: Tensor
    items: Tensor
    rated: Tensor  # bool [users, items], in training
    candidates: Tensor  # [users, 1 + 99]


@cache
def read_movielens(folder: Path | None, device: str, sizes: Sizes = OFFICIAL) -> Ratings:
    if folder is not None and MOVIELENS.look(folder, "ratings.dat") is not None:
        return _from_grouplens(folder, device, sizes)
    test = MOVIELENS.find(folder, *_TEST, "ratings.dat")
    held_out = MOVIELENS.read_numbers(test, columns=4)[:, 1]
    MOVIELENS.check_count(test, "users", len(held_out), sizes.users)
    others = _read_negatives(MOVIELENS.find(folder, *_NEGATIVE), sizes)
    pairs = _read_training(MOVIELENS.find(folder, *_TRAINING), sizes)
    candidates = torch.from_numpy(np.column_stack([held_out, others])).to(device)
    return _ratings(torch.from_numpy(pairs).to(device), candidates, sizes)


@cache
def synthetic_movielens(device: str) -> Ratings:
    """Users of three kinds rate only every third item."""
    users = torch.arange(SYNTHETIC.users, device=device).repeat_interleave(10)
    thirds = SYNTHETIC.items // 3
    items = users % 3 + 3 * numbers_below(thirds, len(users), device, 7)
    pairs = torch.stack([users, items], 1).unflatten(0, (SYNTHETIC.users, 10))
    held_out, training = pairs[:, 0, 1], pairs[:, 1:].flatten(0, 1)
    return _ratings(training, _with_others(training, held_out, SYNTHETIC), SYNTHETIC)


def _from_grouplens(folder: Path, device: str, sizes: Sizes) -> Ratings:
    """Numbers users and items in the order in which the file brings them."""
    path = MOVIELENS.find(folder, "ratings.dat")
    rows = MOVIELENS.read_numbers(path, columns=4, separator="::")
    MOVIELENS.check_count(path, "ratings", len(rows), sizes.ratings)
    users, items = (_renumbered(column) for column in rows[:, :2].T)
    MOVIELENS.check_count(path, "users", int(users.max()) + 1, sizes.users)
    MOVIELENS.check_count(path, "films", int(items.max()) + 1, sizes.items)
    by_time = np.lexsort((np.arange(len(rows)), rows[:, 3], users))
    last = by_time[np.append(np.diff(users[by_time]) != 0, True)]
    training = np.delete(np.column_stack([users, items]), last, axis=0)
    pairs = torch.from_numpy(training).to(device)
    held_out = torch.from_numpy(items[last]).to(device)
    return _ratings(pairs, _with_others(pairs, held_out, sizes), sizes)


def _ratings(pairs: Tensor, candidates: Tensor, sizes: Sizes) -> Ratings:
    users, items = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    return Ratings(users, items, _marked(pairs, sizes), candidates)


def _with_others(training: Tensor, held_out: Tensor, sizes: Sizes) -> Tensor:
    """Beside each held-out item, 99 different ones that the user never rated."""
    closed = _marked(training, sizes)
    closed[torch.arange(sizes.users), held_out] = True
    count = sizes.users * sizes.items
    draws = random_bits(mix(_TEST_KEY), count, held_out.device).view(closed.shape)
    order = draws.masked_fill(closed, 2**32).argsort(dim=1, stable=True)
    return torch.cat([held_out[:, None], order[:, :NEGATIVES]], 1)


def _marked(pairs: Tensor, sizes: Sizes) -> Tensor:
    rated = torch.zeros(sizes.users, sizes.items, dtype=torch.bool, device=pairs.device)
    rated[pairs[:, 0], pairs[:, 1]] = True
    return rated


def _renumbered(column: np.ndarray) -> np.ndarray:
    _, first, place = np.unique(column, return_index=True, return_inverse=True)
    numbers = np.empty(len(first), np.int64)
    numbers[first.argsort()] = np.arange(len(first))
    return np.asarray(numbers[place])


def _read_negatives(path: Path, sizes: Sizes) -> np.ndarray:
    """Lines of "(user,item)" and 99 items that the user did not rate."""
    rows = [line.split("\t")[1:] for line in MOVIELENS.read_text(path).splitlines()]
    MOVIELENS.check_count(path, "users", len(rows), sizes.users)
    for number, row in enumerate(rows, start=1):
        if len(row) != NEGATIVES or not all(word.isdecimal() for word in row):
            raise MOVIELENS.broken(path, f"line {number}: expected {NEGATIVES} items of others")
    return _checked(path, np.array(rows, dtype=np.int64), sizes.items)


def _read_training(path: Path, sizes: Sizes) -> np.ndarray:
    if path.suffix == ".npz":
        columns = MOVIELENS.read_arrays(path, "user", "item", "held_out")
        pairs = np.column_stack([columns["user"], columns["item"]]).astype(np.int64)
        pairs = pairs[~columns["held_out"].astype(bool)]
    else:
        pairs = MOVIELENS.read_numbers(path, columns=4)[:, :2]
    MOVIELENS.check_count(path, "training ratings", len(pairs), sizes.ratings - sizes.users)
    _checked(path, pairs[:, 0], sizes.users)
    _checked(path, pairs[:, 1], sizes.items)
    return pairs


def _checked(path: Path, numbers: np.ndarray, bound: int) -> np.ndarray:
    if numbers.min() < 0 or numbers.max() >= bound:
        raise MOVIELENS.broken(path, f"has number {numbers.max()}, expected less than {bound}")
    return numbers
