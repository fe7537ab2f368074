"""MovieLens-1M as pairs of user and film, with one rating of every user held out (He et al. 2017).

Reads GroupLens's ratings.dat and holds out every user's last rating with 99 sampled films, or the
files of the authors of NCF, which list the held-out ratings: ml-1m.test.rating,
ml-1m.test.negative and ml-1m.train.rating (or ml-1m.implicit.npz: user, item, held_out).
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire.bench.datasets.sampling import random_integers
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
    """Ids of users and items; row u of `candidates` is user u's held-out item and 99 others."""

    users: Tensor
    items: Tensor
    rated: Tensor  # bool [users, items], in training
    candidates: Tensor  # [users, 1 + 99]


@cache
def read_movielens(folder: Path | None, device: str, sizes: Sizes = OFFICIAL) -> Ratings:
    if folder is not None and MOVIELENS.find_optional(folder, "ratings.dat") is not None:
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
    """Makes three groups of users, each of which rates its own third of the items."""
    users = torch.arange(SYNTHETIC.users, device=device).repeat_interleave(10)
    thirds = SYNTHETIC.items // 3
    items = users % 3 + 3 * random_integers(thirds, len(users), device, 7)
    pairs = torch.stack([users, items], 1).unflatten(0, (SYNTHETIC.users, 10))
    held_out, training = pairs[:, 0, 1], pairs[:, 1:].flatten(0, 1)
    return _ratings(training, _with_negatives(training, held_out, SYNTHETIC), SYNTHETIC)


def _from_grouplens(folder: Path, device: str, sizes: Sizes) -> Ratings:
    """Reads ratings.dat; ids of users and items follow the order of first appearance."""
    path = MOVIELENS.find(folder, "ratings.dat")
    rows = MOVIELENS.read_numbers(path, columns=4, separator="::")
    MOVIELENS.check_count(path, "ratings", len(rows), sizes.ratings)
    users, items = (_dense_ids(column) for column in rows[:, :2].T)
    MOVIELENS.check_count(path, "users", int(users.max()) + 1, sizes.users)
    MOVIELENS.check_count(path, "films", int(items.max()) + 1, sizes.items)
    by_time = np.lexsort((np.arange(len(rows)), rows[:, 3], users))
    last = by_time[np.append(np.diff(users[by_time]) != 0, True)]
    training = np.delete(np.column_stack([users, items]), last, axis=0)
    pairs = torch.from_numpy(training).to(device)
    held_out = torch.from_numpy(items[last]).to(device)
    return _ratings(pairs, _with_negatives(pairs, held_out, sizes), sizes)


def _ratings(pairs: Tensor, candidates: Tensor, sizes: Sizes) -> Ratings:
    users, items = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    return Ratings(users, items, _rated_mask(pairs, sizes), candidates)


def _with_negatives(training: Tensor, held_out: Tensor, sizes: Sizes) -> Tensor:
    """Returns every user's held-out item and 99 different items that the user never rated."""
    excluded = _rated_mask(training, sizes)
    excluded[torch.arange(sizes.users), held_out] = True
    count = sizes.users * sizes.items
    draws = random_bits(mix(_TEST_KEY), count, held_out.device).view(excluded.shape)
    order = draws.masked_fill(excluded, 2**32).argsort(dim=1, stable=True)
    return torch.cat([held_out[:, None], order[:, :NEGATIVES]], 1)


def _rated_mask(pairs: Tensor, sizes: Sizes) -> Tensor:
    rated = torch.zeros(sizes.users, sizes.items, dtype=torch.bool, device=pairs.device)
    rated[pairs[:, 0], pairs[:, 1]] = True
    return rated


def _dense_ids(column: np.ndarray) -> np.ndarray:
    _, first, place = np.unique(column, return_index=True, return_inverse=True)
    numbers = np.empty(len(first), np.int64)
    numbers[first.argsort()] = np.arange(len(first))
    return np.asarray(numbers[place])


def _read_negatives(path: Path, sizes: Sizes) -> np.ndarray:
    """Reads lines of "(user,item)" and 99 items that the user did not rate."""
    rows = [line.split("\t")[1:] for line in MOVIELENS.read_text(path).splitlines()]
    MOVIELENS.check_count(path, "users", len(rows), sizes.users)
    for number, row in enumerate(rows, start=1):
        if len(row) != NEGATIVES or not all(word.isdecimal() for word in row):
            raise MOVIELENS.file_error(path, f"line {number}: expected {NEGATIVES} negative items")
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
        raise MOVIELENS.file_error(path, f"has id {numbers.max()}, expected less than {bound}")
    return numbers
