import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from gradwire.bench.datasets.movielens import (
    NEGATIVES,
    SYNTHETIC,
    Sizes,
    read_movielens,
    synthetic_movielens,
)
from gradwire.bench.workloads.base import parse_workload
from gradwire.bench.workloads.neumf import NeuMf, _unrated
from gradwire.errors import ConfigError

# Two users with 3 and 2 films out of 105; the last of each by time is held out.
RATED = ((0, 0, 30), (0, 1, 10), (0, 2, 20), (1, 1, 5), (1, 3, 7))
ITEMS = 105
FILM = {item: 1000 - item for item in range(ITEMS)}


def write_ncf(folder: Path) -> Sizes:
    others = "\t".join(str(item) for item in range(4, 4 + NEGATIVES))
    (folder / "ml-1m.train.rating").write_text("0\t1\t5\t10\n0\t2\t5\t20\n1\t1\t5\t5\n")
    (folder / "ml-1m.test.rating").write_text("0\t0\t5\t30\n1\t3\t5\t7\n")
    lines = f"(0,0)\t{others}\n(1,3)\t{others}\n"
    (folder / "ml-1m.test.negative.gz").write_bytes(gzip.compress(lines.encode()))
    return Sizes(2, ITEMS, 5)


def write_grouplens(folder: Path) -> Sizes:
    """Writes ratings.dat, in which a third user has rated all other films in order."""
    rest = [(2, item, 100 + item) for item in range(4, ITEMS)]
    lines = [f"{9 - user}::{FILM[item]}::4::{time}" for user, item, time in (*RATED, *rest)]
    (folder / "ratings.dat").write_text("\n".join(lines) + "\n")
    return Sizes(3, ITEMS, len(lines))


def pairs_of(users: torch.Tensor, items: torch.Tensor) -> list[tuple[int, int]]:
    return sorted(zip(users.tolist(), items.tolist(), strict=True))


def test_the_files_of_ncf_define_the_held_out_items(tmp_path: Path) -> None:
    users, items, rated, candidates = read_movielens(tmp_path, "cpu", write_ncf(tmp_path))
    assert pairs_of(users, items) == [(0, 1), (0, 2), (1, 1)]
    assert rated.sum() == 3
    assert candidates.tolist() == [[first, *range(4, 103)] for first in (0, 3)]


def test_the_compact_file_holds_the_same(tmp_path: Path) -> None:
    sizes = write_ncf(tmp_path)
    (tmp_path / "ml-1m.train.rating").unlink()
    columns = np.array(RATED).T
    held_out = np.array([True, False, False, False, True])
    np.savez(tmp_path / "ml-1m.implicit.npz", user=columns[0], item=columns[1], held_out=held_out)
    users, items, _, _ = read_movielens(tmp_path, "cpu", sizes)
    assert pairs_of(users, items) == [(0, 1), (0, 2), (1, 1)]


def test_the_last_rating_of_every_user_of_grouplens_is_held_out(tmp_path: Path) -> None:
    users, items, rated, candidates = read_movielens(tmp_path, "cpu", write_grouplens(tmp_path))
    first = [(user, item) for user, item in pairs_of(users, items) if user < 2]
    assert first == [(0, 1), (0, 2), (1, 1)]
    assert candidates[:, 0].tolist() == [0, 3, ITEMS - 1]
    for user in (0, 1):
        others = candidates[user, 1:]
        assert len(others.unique()) == NEGATIVES
        assert not rated[user, others].any()
        assert candidates[user, 0] not in others


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ml-1m.test.rating", None, "no ml-1m.test.rating or "),
        ("ml-1m.test.rating", "0\t0\t5\t30\n", "has 1 users, the official file 2"),
        ("ml-1m.train.rating", "0\t1\t5\n", "line 1: expected 4 whole numbers"),
        ("ml-1m.train.rating", "0\t1\t5\t1\n" * 2, "has 2 training ratings, the official file 3"),
        ("ml-1m.train.rating", "0\t999\t5\t1\n" * 3, "has id 999, expected less than 105"),
        ("ml-1m.test.negative", "(0,0)\t4\n(1,3)\t5\n", "line 1: expected 99 negative items"),
        ("ratings.dat", "1::2::3\n", "line 1: expected 4 whole numbers"),
        ("ratings.dat", "1::2::3::4\n", "has 1 ratings, the official file 5"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    sizes = write_ncf(tmp_path)
    for file in tmp_path.glob(f"{name}*"):
        file.unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_movielens(tmp_path, "cpu", sizes)
    error = str(caught.value)
    assert error.startswith("MovieLens-1M: ")
    assert name in error
    assert message in error
    assert error.endswith("from https://grouplens.org/datasets/movielens/1m/")


@pytest.mark.parametrize("name", ["ml-1m.test.negative.gz", "ml-1m.implicit.npz"])
def test_a_torn_archive_is_named(tmp_path: Path, name: str) -> None:
    sizes = write_ncf(tmp_path)
    (tmp_path / "ml-1m.train.rating").unlink()
    np.savez(tmp_path / "ml-1m.implicit.npz", user=[0], item=[0], held_out=[False])
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-30])
    with pytest.raises(ConfigError, match=rf"{name} (cannot be unpacked|is not an \.npz file)"):
        read_movielens(tmp_path, "cpu", sizes)


def test_an_epoch_has_every_rating_once_and_unrated_items() -> None:
    workload = parse_workload("neumf-tiny:batch_size=27")
    assert isinstance(workload, NeuMf)
    users, items, rated, _ = workload.ratings()
    batches = [workload.batch(step, 0, 1, 0) for step in range(len(users) * 5 // 27)]
    pairs = torch.cat([batch.inputs for batch in batches])
    truth = torch.cat([batch.targets for batch in batches]).bool()
    assert pairs_of(*pairs[truth].T) == pairs_of(users, items)
    assert torch.equal(rated[pairs[:, 0], pairs[:, 1]], truth)


def test_only_unrated_items_are_sampled_even_if_there_is_only_one() -> None:
    rated = torch.ones(3, 9, dtype=torch.bool)
    rated[torch.arange(3), torch.tensor([2, 5, 8])] = False
    assert _unrated(rated, torch.tensor([2, 0, 1, 0]), seed=0, epoch=0).tolist() == [8, 2, 5, 2]


class Oracle(torch.nn.Module):
    """Scores an item by its index among the candidates of its user."""

    def __init__(self, scores: list[float]) -> None:
        torch.nn.Module.__init__(self)
        self.scores = torch.tensor(scores)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        return self.scores.repeat(len(pairs) // len(self.scores))


@pytest.mark.parametrize(("better", "hit_rate"), [(0, 1.0), (9, 1.0), (10, 0.0)])
def test_a_hit_is_among_the_best_ten(better: int, hit_rate: float) -> None:
    scores = [0.0] + [1.0] * better + [-1.0] * (NEGATIVES - better)
    assert synthetic_movielens("cpu").candidates.shape == (SYNTHETIC.users, 1 + NEGATIVES)
    assert parse_workload("neumf-tiny").evaluate(Oracle(scores)).metric == hit_rate


def test_a_model_with_equal_scores_for_all_items_has_no_hits() -> None:
    assert parse_workload("neumf-tiny").evaluate(Oracle([0.0] * 100)).metric == 0
