"""Sketched SGD: the largest entries of the mean, found without a position on the wire."""

from hashlib import sha256

import pytest
import torch
from few_ranks import Ranks, bits_per_entry, eighths, normal, roundtrip, squared_error, with_entry
from torch import Tensor

from gradwire.compressors.sketchedsgd import SketchedSGD, median
from gradwire.errors import ConfigError
from gradwire.types import EncodeContext


def heavy(numel: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A little noise with `count` entries that stand out, and where they are."""
    places = torch.randperm(numel, generator=torch.Generator().manual_seed(seed))[:count]
    x = 0.1 * normal(numel, seed=seed)
    x[places] = torch.where(normal(count, seed=seed) > 0, 10.0, -10.0) + normal(count, seed=seed)
    return x, places.sort().values


def ideal_bits(codec: SketchedSGD, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return 32 * codec.ratio * (codec.rows * codec.width + 1)


def test_by_hand() -> None:
    """One entry that is not zero: each row has it once, and it is what comes out."""
    x = with_entry(torch.zeros(400), 123, -2.5)
    table, values = SketchedSGD(ratio=0.0025).encode(x).parts
    assert table.view(3, 4).abs().sum(1).tolist() == [2.5, 2.5, 2.5]
    assert values.numel() == 2, "one for the largest, and one drawn blindly"
    wide = SketchedSGD(ratio=0.0025, width=400, rows=5)
    assert torch.equal(roundtrip(wide, x), x)


def test_middle_of_rows() -> None:
    for count in (1, 3, 5, 7):
        rows = normal(count, 1000)
        assert torch.equal(median(list(rows)), rows.median(0).values)


def test_finds_entries_that_stand_out() -> None:
    x, places = heavy(10_000, 10)
    out = roundtrip(SketchedSGD(ratio=0.001, rows=5, width=100), x)
    assert torch.equal(out[places], x[places])
    assert out.count_nonzero() == 11, "those, and one drawn blindly"


def test_finds_what_stands_out_in_the_mean_only() -> None:
    """Each rank has large entries that the others cancel, and small ones that all have."""
    x, places = heavy(10_000, 10)
    noise = [heavy(10_000, 10, seed=seed)[0] * 3 for seed in (1, 2)]
    ranks = Ranks("sketchedsgd:ratio=0.001,rows=5,width=100", "none", "mean", (10_000,), size=4)
    grads = [x + noise[0], x - noise[0], x + noise[1], x - noise[1]]
    out = ranks.step(*grads)
    assert out.count_nonzero() == 11
    torch.testing.assert_close(out[places], x[places], rtol=1e-5, atol=1e-5)


def test_sent_values_are_subtracted_from_the_residual() -> None:
    x, places = heavy(10_000, 10)
    ranks = Ranks("sketchedsgd:ratio=0.001,rows=5,width=100", "residual", "mean", (10_000,))
    out = ranks.step(x, 2 * x)
    decoded = out.nonzero().view(-1)
    assert set(places.tolist()) < set(decoded.tolist())
    for rank, own in enumerate((x, 2 * x)):
        assert torch.equal(ranks.residual(rank), own.index_fill(0, decoded, 0.0))
    torch.testing.assert_close(out[places], 1.5 * x[places])


def test_error_is_at_most_what_a_random_choice_would_lose() -> None:
    """On average over hashes, also where the sketch cannot distinguish the entries."""
    codec = SketchedSGD(ratio=0.05, rows=3, width=2)
    for x in (normal(1000), torch.ones(1000), normal(1000) ** 5, eighths(1000)):
        errors = [
            squared_error(x, roundtrip(codec, x, EncodeContext((1000,), step=s))) for s in range(50)
        ]
        assert max(errors) < 1
        assert sum(errors) / 50 <= 1 - 0.05 + 0.005


def test_one_entry_is_drawn_blindly_so_its_bound_holds_for_every_input() -> None:
    """Even where the sketch is one column wide, and finds none of the one entry that matters."""
    codec, x = SketchedSGD(ratio=0.001, rows=1, width=1), torch.zeros(1000)
    x[:20], x[777] = 0.1, 1.0
    errors = torch.tensor(
        [squared_error(x, roundtrip(codec, x, EncodeContext((1000,), step=s))) for s in range(2000)]
    )
    assert errors.max() <= 1
    assert errors.mean() <= 1 - 1 / 1000 + 4 * errors.std() / 2000**0.5
    drawn = {
        int(codec._largest_positions(torch.zeros(1, 1), codec._hashes(t, x.device), t)[-1])
        for t in (EncodeContext((1000,), step=s) for s in range(200))
    }
    assert len(drawn) > 150


def test_sent_values_are_exact() -> None:
    x = normal(1000)
    out = roundtrip(SketchedSGD(ratio=0.05), x)
    kept = out != 0
    assert kept.sum() == 51
    assert torch.equal(out[kept], x[kept])


def test_two_means_a_step() -> None:
    ranks = Ranks("sketchedsgd:ratio=0.01", "residual", "mean", (1000,))
    ranks.step(normal(1000), normal(1000, seed=1))
    assert ranks.network.meters[0].calls == 2
    assert ranks.network.meters[0].message_bytes == 4 * (3 * 4 * 10 + 11)


def test_every_step_and_parameter_has_its_own_hashes() -> None:
    codec, x, ctx = SketchedSGD(ratio=0.05), normal(1000), EncodeContext((1000,))
    first = codec.encode(x, ctx).parts[0]
    assert torch.equal(codec.encode(x, ctx._replace(rank=1)).parts[0], first)
    for other in (ctx._replace(step=1), ctx._replace(lane_id=1), ctx._replace(seed=1)):
        assert not torch.equal(codec.encode(x, other).parts[0], first)
    assert not torch.equal(first[0], first[1])


def test_columns_and_signs_are_spread_evenly() -> None:
    hashes = SketchedSGD(ratio=0.0004)._hashes(EncodeContext((100_000,)), torch.device("cpu"))
    for column, sign in hashes:
        counts = torch.bincount(column, minlength=160)
        assert counts.numel() == 160
        assert ((counts - 625).abs() < 5 * 25).all()
        assert abs(float(sign.mean())) < 4 / 100_000**0.5
        by_column = torch.zeros(160).index_add_(0, column, sign)
        assert (by_column.abs() < 5 * 25).all()


@pytest.mark.parametrize("numel", [0, 1, 7])
@pytest.mark.parametrize("memory", ["none", "residual"])
def test_zeros_and_sizes(numel: int, memory: str) -> None:
    ranks = Ranks("sketchedsgd:ratio=1.0", memory, "mean", (numel,))
    assert torch.equal(ranks.step(*[torch.zeros(numel)] * 2), torch.zeros(numel))
    x = normal(numel)
    assert torch.equal(ranks.step(x, x), x)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_appear_and_do_not_stay(bad: float) -> None:
    ranks = Ranks("sketchedsgd:ratio=0.01", "none", "mean", (1000,), size=3)
    out = ranks.step(normal(1000), with_entry(normal(1000), 7, bad), normal(1000))
    assert out.isnan().sum() == 11
    assert ranks.step(*[normal(1000)] * 3).isfinite().all()


def test_bits_on_the_wire() -> None:
    bits = bits_per_entry(SketchedSGD(ratio=0.01, rows=3, width=4), normal(1_000_000))
    assert bits == pytest.approx(32 * 0.01 * (3 * 4 + 1), rel=1e-4)


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    """Multiples of 1/8, whose sums are exact in any order."""
    table, values = SketchedSGD(ratio=0.05).encode(eighths(1000)).parts
    wire_bytes = table.numpy().tobytes() + values.numpy().tobytes()
    assert sha256(wire_bytes).hexdigest()[:8] == "b3185680"


@pytest.mark.parametrize("ratio", [0.0, 1.5, float("nan")])
def test_ratio_out_of_range(ratio: float) -> None:
    with pytest.raises(
        ConfigError, match=rf"^sketchedsgd: ratio must be in \(0, 1\], got {ratio}$"
    ):
        SketchedSGD(ratio=ratio)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"rows": 4}, "rows must be odd, got 4"),
        ({"rows": 1.5}, "rows must be a whole number, at least 1, got 1.5"),
        ({"width": 0}, "width must be at least 1, got 0"),
    ],
)
def test_settings_out_of_range(settings: dict[str, int], rule: str) -> None:
    with pytest.raises(ConfigError, match=f"^sketchedsgd: {rule}$"):
        SketchedSGD(**settings)
