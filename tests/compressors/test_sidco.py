"""SIDCo: a threshold from an exponential fit, stage by stage."""

from math import log

import pytest
import torch
from few_ranks import Ranks, eighths, normal, roundtrip, squared_error, wire_hash, with_entry
from torch import Tensor

from gradwire.compressors.sidco import SIDCo
from gradwire.errors import ConfigError
from gradwire.kernels.reference import excess_threshold
from gradwire.types import EFInput, EncodeContext


def chosen(x: Tensor, codec: SIDCo) -> Tensor:
    return codec.select(EFInput(x), EncodeContext((x.numel(),)))


def exponential(numel: int) -> Tensor:
    """Magnitudes that are exponential, with random signs."""
    generator = torch.Generator().manual_seed(0)
    size = -torch.log1p(-torch.rand(numel, generator=generator))
    return size * normal(numel, seed=1).sign()


def test_threshold_of_one_stage_by_hand() -> None:
    """Mean 2, so a quarter should exceed 2 ln 4 = 2.77."""
    x = torch.tensor([1.0, -1.0, 4.0, -2.0])
    assert float(excess_threshold(EFInput(x), [0.25])) == pytest.approx(2 * log(4))
    assert roundtrip(SIDCo(ratio=0.25, stages=1), x).tolist() == [0.0, 0.0, 4.0, 0.0]


def test_threshold_of_two_stages_by_hand() -> None:
    """Mean 2; 3 and 6 exceed 2.77, by 1.73 on average; so half of them should exceed 3.97."""
    x = torch.tensor([1.0, 0.5, 3.0, 0.5, 1.0, 6.0])
    first = 2 * log(4)
    second = first + (4.5 - first) * log(2)
    assert float(excess_threshold(EFInput(x), [0.25, 0.5])) == pytest.approx(second)


def test_shares_multiply_to_the_ratio() -> None:
    assert SIDCo(ratio=0.01).shares() == pytest.approx([0.25, 0.25, 0.16])
    assert SIDCo(ratio=0.01, stages=1).shares() == (0.01,)
    # No more stages than quarters go into the ratio.
    assert SIDCo(ratio=0.1, stages=9).shares() == pytest.approx([0.25, 0.4])
    assert SIDCo(ratio=0.5, stages=9).shares() == (0.5,)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
def test_exact_for_exponential_magnitudes(ratio: float, stages: int) -> None:
    found = chosen(exponential(200_000), SIDCo(ratio=ratio, stages=stages)).numel()
    assert found == pytest.approx(ratio * 200_000, rel=0.15)


def test_stages_correct_the_fit() -> None:
    """Normal tails are lighter: one stage is far off, and every further one comes closer."""
    x = normal(200_000)
    off = [abs(chosen(x, SIDCo(ratio=0.01, stages=s)).numel() - 2000) for s in (1, 2, 3)]
    assert off[0] > off[1] > off[2]
    assert off[2] < 400


@pytest.mark.parametrize("stages", [1, 3])
def test_at_least_one_and_at_most_twice_the_target(stages: int) -> None:
    codec = SIDCo(ratio=0.01, stages=stages)
    for x in (normal(10_000) ** 5, normal(10_000) + 10, torch.ones(10_000), eighths(10_000)):
        index = chosen(x, codec)
        assert 1 <= index.numel() <= 200
        assert x[index].abs().min() >= x.abs().index_fill(0, index, 0).max()
        assert squared_error(x, roundtrip(codec, x)) < 1


def test_something_is_sent_where_the_fit_exceeds_everything() -> None:
    """The threshold would be above all: those of largest magnitude are sent."""
    assert chosen(with_entry(torch.ones(100), 9, -1.1), SIDCo(ratio=0.01)).tolist() == [9]
    assert chosen(torch.tensor([0.5]), SIDCo(ratio=0.01)).tolist() == [0]
    assert chosen(with_entry(torch.zeros(100), 9, 1e-45), SIDCo(ratio=0.01)).tolist() == [9]


@pytest.mark.parametrize("scale", [1e37, 1e-35])
def test_scale_does_not_matter(scale: float) -> None:
    x = normal(10_000)
    one, two = (chosen(x * s, SIDCo(ratio=0.01)).numel() for s in (1.0, scale))
    assert abs(one - two) <= 1


@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
def test_zeros_send_nothing(numel: int) -> None:
    assert chosen(torch.zeros(numel), SIDCo(ratio=0.1)).tolist() == []
    assert torch.equal(roundtrip(SIDCo(ratio=0.1), torch.zeros(numel)), torch.zeros(numel))


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_are_selected(backend: str, exchange_name: str, bad: float) -> None:
    ranks = Ranks("sidco:ratio=0.1", "residual", exchange_name, (100,), size=3)
    out = ranks.step(normal(100), with_entry(normal(100), 7, bad), normal(100))
    assert not out[7].isfinite()
    assert out[torch.arange(100) != 7].isfinite().all()


def test_bits_on_the_wire() -> None:
    x = exponential(1_000_000)
    # 16 bits of value and less than 9 of position.
    assert 8 * SIDCo(ratio=0.01).encode(x).nbytes / chosen(x, SIDCo(ratio=0.01)).numel() <= 25


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(SIDCo(ratio=0.1), eighths(1000)) == "d2ce28f0"
    assert wire_hash(SIDCo(ratio=0.4, stages=1, values="fp32"), eighths(4097)) == "442da62c"


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, float("nan")])
def test_ratio_out_of_range(ratio: float) -> None:
    with pytest.raises(ConfigError, match=rf"^sidco: ratio must be in \(0, 1\], got {ratio}$"):
        SIDCo(ratio=ratio)


def test_bad_stages_and_format() -> None:
    with pytest.raises(ConfigError, match=r"^sidco: stages must be 1 to 16, got 0$"):
        SIDCo(ratio=0.1, stages=0)
    with pytest.raises(ConfigError, match=r"^sidco: values must be one of .*, got 'fp8'$"):
        SIDCo(ratio=0.1, values="fp8")  # type: ignore[arg-type]
