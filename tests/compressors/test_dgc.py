"""DGC's choice: the top of the entries, by a sampled threshold."""

import pytest
import torch
from few_ranks import Ranks, eighths, normal, roundtrip, squared_error, wire_hash, with_entry
from torch import Tensor

from gradwire.compressors.dgc import DGC
from gradwire.errors import ConfigError
from gradwire.types import EFInput, EncodeContext


def chosen(x: Tensor, codec: DGC, step: int = 0) -> Tensor:
    return codec.select(EFInput(x), EncodeContext((x.numel(),), step=step))


def test_with_all_entries_in_the_sample_it_is_top_k() -> None:
    x = torch.tensor([1.0, -4.0, 2.0, 3.0])
    assert roundtrip(DGC(ratio=0.5), x).tolist() == [0.0, -4.0, 0.0, 3.0]
    x = normal(1000)
    best = x.abs().topk(100).indices.sort().values
    assert torch.equal(chosen(x, DGC(ratio=0.1, sample=1.0)), best)


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("power", [1, 5])
def test_sends_the_top_and_nearly_all_of_it(ratio: float, power: int) -> None:
    x = normal(20_000) ** power
    count = round(20_000 * ratio)
    for step in range(20):
        index = chosen(x, DGC(ratio=ratio), step)
        assert 0.8 * count <= index.numel() <= count
        best = x.abs().topk(index.numel()).indices.sort().values
        assert torch.equal(index, best)


def test_error_is_at_most_what_an_even_spread_would_lose() -> None:
    for x in (normal(10_000), torch.ones(10_000), normal(10_000) ** 5, eighths(10_000)):
        assert squared_error(x, roundtrip(DGC(ratio=0.1, values="fp32"), x)) <= 1 - 0.08


def test_a_threshold_that_only_passes_few_is_lowered() -> None:
    """Most samples of one fourth miss none of the big ones, so the threshold is one of them."""
    x = torch.cat([torch.full((50,), 10.0), torch.full((950,), 2.0)])
    for step in range(20):
        assert chosen(x, DGC(ratio=0.1, sample=0.25), step).numel() == 100


def test_rounds_are_bounded() -> None:
    """No threshold passes more than there is, and lowering it ends after ten rounds."""
    x = with_entry(torch.full((1000,), 1e-30), 5, 1.0)
    sizes = {chosen(x, DGC(ratio=0.1), step).numel() for step in range(20)}
    assert sizes <= {1, 100}
    assert chosen(with_entry(torch.zeros(1000), 5, 1.0), DGC(ratio=0.1)).tolist() == [5]


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    assert chosen(torch.full((1000,), -0.1), DGC(ratio=0.01)).tolist() == list(range(10))


def test_ranks_draw_samples_of_their_own() -> None:
    x = normal(20_000)
    sizes = [
        DGC(ratio=0.01).select(EFInput(x), EncodeContext((20_000,), rank=rank)).numel()
        for rank in range(8)
    ]
    assert len(set(sizes)) > 1


@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
def test_zeros_send_nothing(numel: int) -> None:
    assert chosen(torch.zeros(numel), DGC(ratio=0.1)).tolist() == []
    assert torch.equal(roundtrip(DGC(ratio=0.1), torch.zeros(numel)), torch.zeros(numel))


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_are_selected(backend: str, exchange_name: str, bad: float) -> None:
    ranks = Ranks("dgc:ratio=0.1", "residual", exchange_name, (100,), size=3)
    out = ranks.step(normal(100), with_entry(normal(100), 7, bad), normal(100))
    assert not out[7].isfinite()
    assert out[torch.arange(100) != 7].isfinite().all()


def test_momentum_is_reset_where_it_was_sent() -> None:
    """The two halves of the paper together."""
    ranks = Ranks("dgc:ratio=0.5,values=fp32", "momentum:momentum=0.5", "gather", (2,), size=1)
    grad = torch.tensor([4.0, 3.0])
    assert ranks.step(grad).tolist() == [4.0, 0.0]
    # The waiting entry has 3 + (0.5 * 3 + 3) by now.
    assert ranks.step(grad).tolist() == [0.0, 7.5]


def test_bits_on_the_wire() -> None:
    x, codec = normal(1_000_000), DGC(ratio=0.01)
    # 16 bits of value and less than 9 of position.
    assert 8 * codec.encode(x).nbytes / chosen(x, codec).numel() <= 25


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(DGC(ratio=0.1), eighths(1000)) == "4867a378"
    assert wire_hash(DGC(ratio=0.01, sample=0.1, values="fp32"), eighths(4097)) == "d13b127e"


@pytest.mark.parametrize("key", ["ratio", "sample"])
@pytest.mark.parametrize("value", [0.0, -0.1, 1.5, float("nan")])
def test_fractions_out_of_range(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^dgc: {key} must be in \(0, 1\], got {value}$"):
        DGC(**{"ratio": 0.1, key: value})


def test_unknown_format_of_values() -> None:
    with pytest.raises(ConfigError, match=r"^dgc: values must be one of .*, got 'fp8'$"):
        DGC(ratio=0.1, values="fp8")  # type: ignore[arg-type]
