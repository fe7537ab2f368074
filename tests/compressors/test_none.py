"""No compression: the dense mean, exactly."""

import pytest
import torch
from few_ranks import Ranks, eighths, normal, roundtrip, wire_hash, with_entry

from gradwire.compressors.none import NoCompression


def test_sends_every_bit() -> None:
    x = with_entry(with_entry(normal(9, 7), 3, 1e38), 5, 1e-45)
    assert torch.equal(roundtrip(NoCompression(), x).view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize("exchange_name", ["mean", "gather", "sharded"])
def test_mean_by_hand(exchange_name: str) -> None:
    ranks = Ranks("none", "none", exchange_name, (3,))
    out = ranks.step(torch.tensor([1.0, 2.0, -4.0]), torch.tensor([3.0, 2.0, 4.0]))
    assert out.tolist() == [2.0, 2.0, 0.0]


@pytest.mark.parametrize("exchange_name", ["mean", "gather", "sharded"])
def test_nothing_is_left(exchange_name: str) -> None:
    ranks = Ranks("none", "residual", exchange_name, (50,))
    for step in range(3):
        ranks.step(normal(50, seed=step), normal(50, seed=step + 9))
        assert torch.equal(ranks.residual(), torch.zeros(50))


@pytest.mark.parametrize("exchange_name", ["mean", "gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_entries_stay_in_their_place(exchange_name: str, bad: float) -> None:
    ranks = Ranks("none", "none", exchange_name, (50,))
    out = ranks.step(with_entry(normal(50), 7, bad), normal(50))
    assert out.isfinite().logical_not().nonzero().tolist() == [[7]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_has_the_type_of_the_gradient(dtype: torch.dtype) -> None:
    ranks = Ranks("none", "none", "mean", (50,))
    assert ranks.step(*[normal(50).to(dtype)] * 2).dtype == dtype


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(NoCompression(), eighths(1000)) == "73342b46"
