"""Top-k: the largest entries and no others."""

import pytest
import torch
from few_ranks import Ranks, eighths, normal, roundtrip, squared_error, wire_hash, with_entry

from gradwire.compressors.topk import TopK
from gradwire.errors import ConfigError
from gradwire.types import EncodeContext
from gradwire.wire.indices import unpack_index


def test_keeps_the_largest_magnitudes() -> None:
    index, values = TopK(ratio=0.5).encode(torch.tensor([1.0, -4.0, 2.0, 3.0])).parts
    assert unpack_index(index, 4, 2).tolist() == [1, 3]
    assert values.tolist() == [-4.0, 3.0]


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    x = torch.tensor([1.0, -2.0, 2.0, 2.0])
    assert roundtrip(TopK(ratio=0.5), x).tolist() == [0.0, -2.0, 2.0, 0.0]


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("numel", [1, 7, 1000, 4097])
def test_keeps_exactly_the_largest(ratio: float, numel: int) -> None:
    x = normal(numel)
    codec = TopK(ratio=ratio, values="fp32")
    out = roundtrip(codec, x)
    kept = out != 0
    assert kept.sum() == codec.count(numel) == max(1, round(ratio * numel))
    assert torch.equal(out[kept], x[kept])
    if not kept.all():
        assert x[kept].abs().min() >= x[~kept].abs().max()


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5])
def test_error_is_at_most_what_an_even_spread_would_lose(ratio: float) -> None:
    codec = TopK(ratio=ratio, values="fp32")
    for x in (normal(1000), torch.ones(1000), normal(1000) ** 5):
        assert squared_error(x, roundtrip(codec, x)) <= 1 - ratio + 1e-6


@pytest.mark.parametrize(
    ("values", "bound"), [("fp32", 0.0), ("fp16", 2.0**-11), ("bf16", 2.0**-8)]
)
def test_format_of_values(values: str, bound: float) -> None:
    x = normal(1000)
    out = roundtrip(TopK(ratio=0.1, values=values), x)  # type: ignore[arg-type]
    kept = out != 0
    assert ((out - x)[kept].abs() <= bound * x[kept].abs()).all()


def test_what_was_not_sent_comes_later() -> None:
    ranks = Ranks("topk:ratio=0.25,values=fp32", "residual", "gather", (4,), size=1)
    assert ranks.step(torch.tensor([3.0, 1.0, 2.0, 0.0])).tolist() == [3.0, 0.0, 0.0, 0.0]
    assert ranks.residual().tolist() == [0.0, 1.0, 2.0, 0.0]
    assert ranks.step(torch.tensor([0.0, 1.5, 0.0, 0.0])).tolist() == [0.0, 2.5, 0.0, 0.0]
    assert ranks.step(torch.zeros(4)).tolist() == [0.0, 0.0, 2.0, 0.0]


def test_ranks_choose_for_themselves_and_the_mean_is_over_all() -> None:
    ranks = Ranks("topk:ratio=0.5,values=fp32", "none", "gather", (2,))
    assert ranks.step(torch.tensor([4.0, 1.0]), torch.tensor([1.0, 2.0])).tolist() == [2.0, 1.0]


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_are_selected_first(
    backend: str, exchange_name: str, bad: float
) -> None:
    ranks = Ranks("topk:ratio=0.1", "residual", exchange_name, (100,), size=3)
    out = ranks.step(normal(100), with_entry(normal(100), 7, bad), normal(100))
    assert not out[7].isfinite()


def test_bits_on_the_wire() -> None:
    codec = TopK(ratio=0.01)
    payload = codec.encode(normal(1_000_000))
    assert 8 * payload.nbytes / codec.count(1_000_000) <= 30
    # 16 bits of value and less than 9 of position.
    assert 8 * payload.nbytes / codec.count(1_000_000) == pytest.approx(24.57, abs=0.01)


def test_the_context_does_not_matter() -> None:
    x = normal(100)
    contexts = [
        EncodeContext((100,), rank=rank, world_size=3, seed=rank, step=rank) for rank in range(3)
    ]
    outs = [roundtrip(TopK(ratio=0.1), x, ctx) for ctx in contexts]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(TopK(ratio=0.1), eighths(1000)) == "33d5beb1"
    assert wire_hash(TopK(ratio=0.01, values="fp32"), eighths(4097)) == "4b393c57"


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, float("nan"), float("inf")])
def test_ratio_out_of_range(ratio: float) -> None:
    with pytest.raises(ConfigError, match=rf"^topk: ratio must be in \(0, 1\], got {ratio}$"):
        TopK(ratio=ratio)


def test_unknown_format_of_values() -> None:
    message = r"^topk: values must be one of \['fp32', 'bf16', 'fp16'\], got 'fp8'$"
    with pytest.raises(ConfigError, match=message):
        TopK(ratio=0.1, values="fp8")  # type: ignore[arg-type]


def test_ratio_that_is_no_number() -> None:
    with pytest.raises(ConfigError, match="topk: ratio"):
        TopK(ratio="0.1")  # type: ignore[arg-type]
