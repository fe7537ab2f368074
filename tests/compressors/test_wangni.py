"""Wangni's sparsification: exact on average, with the least variance for its length."""

from hashlib import sha256
from math import log2, sqrt

import pytest
import torch
from few_ranks import Ranks, bits_per_entry, eighths, normal, roundtrip, selection_bits, with_entry
from torch import Tensor

from gradwire.compressors.wangni import Wangni, scale_for
from gradwire.engine.make_plan import make_plan
from gradwire.errors import ConfigError, WireError
from gradwire.types import EncodeContext
from gradwire.wire.layout import pack, unpack


def draws(codec: Wangni, x: Tensor, count: int) -> Tensor:
    """Returns decoded independent messages of `x`, one per row."""
    return torch.stack(
        [roundtrip(codec, x, EncodeContext((x.numel(),), step=s)) for s in range(count)]
    )


def variance(x: Tensor, scale: Tensor) -> float:
    """Returns E|decoded - x|² over |x|²: an entry below the scale s has the variance s|x| - x²."""
    size = x.abs().double()
    return float((scale * size - size.square()).clamp_min(0).sum() / size.square().sum())


def ideal_bits(codec: Wangni, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    large, small = codec.encode(x).parts[0].tolist()
    selection = selection_bits(x.numel(), large + small) + selection_bits(large + small, small)
    return (selection + 32 * large + small) / x.numel()


def test_scale_by_hand() -> None:
    """Two places: 8 takes one, the others share the second, so the scale is their sum."""
    assert float(scale_for(torch.tensor([8.0, 1.0, 1.0, 1.0, 1.0]), 2)) == 4.0
    assert float(scale_for(torch.tensor([1.0, 1.0, 1.0, 1.0]), 2)) == 2.0
    assert float(scale_for(torch.zeros(5), 2)) == 0.0


def test_large_entries_are_exact_and_small_ones_decode_to_the_scale() -> None:
    x = torch.tensor([8.0, -1.0, 1.0, -1.0, 1.0])
    for out in draws(Wangni(ratio=0.4), x, 50):
        assert out[0] == 8.0
        assert set((out[1:] * x[1:]).tolist()) <= {0.0, 4.0}


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5])
def test_probabilities_add_up_to_the_count(ratio: float) -> None:
    for x in (normal(10_000), normal(10_000) ** 5, torch.ones(10_000)):
        count = round(10_000 * ratio)
        scale = scale_for(x.abs(), count)
        total = float((x.abs() / scale).clamp(max=1).sum())
        assert 0.95 * count <= total <= 1.0001 * count


@pytest.mark.parametrize("power", [1, 5])
def test_exact_on_average(power: int) -> None:
    x = normal(300) ** power
    decoded = draws(Wangni(ratio=0.1), x, 800)
    directions = torch.stack([x, torch.ones(300), normal(300, seed=1), normal(300, seed=2)], dim=1)
    sums = (decoded @ directions).double()
    error = (sums.mean(dim=0) - (x @ directions).double()).abs()
    assert (error <= 4 * sums.std(dim=0) / sqrt(800)).all()


@pytest.mark.parametrize("power", [1, 5])
def test_variance_follows_from_the_probabilities(power: int) -> None:
    x = normal(300) ** power
    decoded = draws(Wangni(ratio=0.1), x, 800)
    errors = (decoded - x).double().square().sum(dim=1) / x.double().square().sum()
    expected = variance(x, scale_for(x.abs(), 30))
    assert abs(float(errors.mean()) - expected) <= 4 * float(errors.std()) / sqrt(800)


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5])
def test_variance_is_no_more_than_that_of_a_uniform_choice(ratio: float) -> None:
    for x in (normal(1000), normal(1000) ** 5, torch.ones(1000), eighths(1000)):
        bound = 1 / ratio - 1
        assert variance(x, scale_for(x.abs(), round(1000 * ratio))) <= bound * (1 + 1e-6)


def test_goes_without_a_residual_and_by_gather() -> None:
    plan = make_plan("wangni:ratio=0.1", None, "auto", [], 4)
    assert (plan.describe()["memory"], str(plan.exchange)) == ("none", "gather")
    with pytest.raises(ConfigError, match="variance of up to 9 squared norms"):
        make_plan("wangni:ratio=0.1", "residual", "auto", [], 4)


def test_ranks_draw_for_themselves_and_the_mean_is_over_all() -> None:
    ranks = Ranks("wangni:ratio=0.25", "none", "gather", (4,))
    one, two = with_entry(torch.zeros(4), 1, 4.0), with_entry(torch.zeros(4), 2, -2.0)
    assert ranks.step(one, two).tolist() == [0.0, 2.0, -1.0, 0.0]
    contexts = [EncodeContext((1000,), rank=rank) for rank in range(2)]
    first, second = (roundtrip(Wangni(ratio=0.1), normal(1000), ctx) for ctx in contexts)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
def test_zeros_send_nothing(numel: int) -> None:
    payload = Wangni(ratio=0.1).encode(torch.zeros(numel))
    assert payload.parts[0].tolist() == [0, 0]
    assert torch.equal(Wangni(ratio=0.1).decode(payload), torch.zeros(numel))


def test_one_entry_is_exact() -> None:
    for value in (3.0, -1e-45, 3e38):
        assert roundtrip(Wangni(ratio=0.1), torch.tensor([value])).tolist() == [
            float(torch.tensor(value))
        ]


def test_huge_entries_stay_finite() -> None:
    """The scale would be beyond float32; a smaller one is as unbiased, with more entries."""
    assert roundtrip(Wangni(ratio=0.01), torch.full((1000,), 3e38)).isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_are_always_sent(bad: float) -> None:
    ranks = Ranks("wangni:ratio=0.1", "none", "gather", (100,), size=3)
    out = ranks.step(normal(100), with_entry(normal(100), 7, bad), normal(100))
    assert not out[7].isfinite()
    assert out[torch.arange(100) != 7].isfinite().all()


def test_the_residual_is_what_was_not_sent() -> None:
    """The first step measures the error, which is below the bound with hardly a doubt."""
    ranks = Ranks("wangni:ratio=0.5", "none", "gather", (1000,), size=1)
    ranks.step(normal(1000))
    error = ranks.lanes[0].relative_error
    assert error is not None
    scale = scale_for(normal(1000).abs(), 500)
    assert float(error) ** 2 == pytest.approx(variance(normal(1000), scale), rel=0.3)


def test_bits_on_the_wire() -> None:
    payload = Wangni(ratio=0.01).encode(normal(1_000_000))
    large, small = payload.parts[0].tolist()
    assert large == 0
    assert small == pytest.approx(10_000, rel=0.05)
    # A sign, and the entropy of one position in a hundred.
    entropy = 1 + (log2(100) + 99 * log2(100 / 99))
    assert 8 * payload.nbytes / small <= 1.1 * entropy


@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
def test_bits_are_near_the_entropy(ratio: float) -> None:
    codec, x = Wangni(ratio=ratio), normal(1_000_000)
    assert int(codec.encode(x).parts[0].sum()) == pytest.approx(ratio * x.numel(), rel=0.1)
    assert bits_per_entry(codec, x) <= 1.4 * ideal_bits(codec, x)


@pytest.mark.parametrize(("place", "value"), [(0, 7), (0, -1), (1, 1001)])
def test_counts_that_do_not_fit_are_refused(place: int, value: int) -> None:
    codec = Wangni(ratio=0.1)
    layout, parts = codec.layout(1000), codec.encode(normal(1000) ** 5).parts
    parts[0][place] = value
    with pytest.raises(WireError):
        unpack(pack([parts], [layout]), [layout])


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    codec = Wangni(ratio=0.1)
    hashes = []
    for x in (eighths(1000), with_entry(eighths(4097), 3, 1e6)):
        packed = pack([codec.encode(x).parts], [codec.layout(x.numel())])
        hashes.append(sha256(packed.numpy().tobytes()).hexdigest()[:8])
    assert hashes == ["41eafb11", "83280eaa"]


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, float("nan")])
def test_ratio_out_of_range(ratio: float) -> None:
    with pytest.raises(ConfigError, match=rf"^wangni: ratio must be in \(0, 1\], got {ratio}$"):
        Wangni(ratio=ratio)
