"""Variance: persistent gradients are sent soon, noise is held back, and the residual is bounded."""

import pytest
import torch
from few_ranks import (
    CPU,
    Ranks,
    bits_per_entry,
    eighths,
    normal,
    roundtrip,
    selection_bits,
    wire_hash,
    with_entry,
)
from torch import Tensor

from gradwire.compressors.variance import TYPICAL_RATIO, Variance
from gradwire.engine.legality import check_memory, wants_residual
from gradwire.errors import ConfigError, WireError
from gradwire.spec import parse_memory
from gradwire.types import EncodeContext

PLAIN = "variance:alpha={},zeta=0.999999,shrink=0"


def ideal_bits(codec: Variance, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    count = int(codec.encode(x).parts[0])
    return (selection_bits(x.numel(), count) + 16 * count) / x.numel()


def test_one_step_by_hand() -> None:
    """Squares 1, 1, 1, 25 have the mean 7: v is 4, 4, 4, 16, and only 25 is above 1.5 of that."""
    assert roundtrip(Variance(), torch.tensor([1.0, -1.0, 1.0, -5.0])).tolist() == [
        0.0,
        0.0,
        0.0,
        -5.0,
    ]


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.5, 7.5])
def test_a_persistent_gradient_is_sent_after_alpha_steps(alpha: float) -> None:
    """After t steps of g, r² is t² g² and v is t g²."""
    ranks = Ranks(PLAIN.format(alpha), "residual", "gather", (3,), size=1)
    g = torch.tensor([0.5, -2.0, 64.0])
    steps = int(alpha) + 1
    for _ in range(3):
        decoded = torch.stack([ranks.step(g) for _ in range(steps)])
        assert torch.equal(decoded[:-1], torch.zeros(steps - 1, 3))
        assert torch.equal(decoded[-1], steps * g)


def test_a_gradient_that_changes_sign_is_never_sent() -> None:
    ranks = Ranks(PLAIN.format(1.5), "residual", "gather", (2,), size=1)
    for step in range(50):
        assert ranks.step(torch.tensor([3.0, -1.0]) * (-1) ** step).count_nonzero() == 0
    assert ranks.residual().abs().max() <= 3


def test_a_residual_is_sent_once_its_variance_has_decayed() -> None:
    ranks = Ranks("variance:alpha=5,zeta=0.5,shrink=0", "residual", "gather", (1,), size=1)
    decoded = [float(ranks.step(torch.full((1,), g))) for g in (1.0, 0.0, 0.0, 0.0)]
    # v is 1, 1/2, 1/4, 1/8, and r is 1.
    assert decoded == [0.0, 0.0, 0.0, 1.0]


def test_persistent_entries_are_sent_more_often_than_noise() -> None:
    ranks = Ranks(Variance(), "residual", "gather", (2000,), size=1)
    times = torch.zeros(2000)
    for step in range(200):
        g = normal(2000, seed=step)
        g[:200] += 0.5
        times += ranks.step(g) != 0
    assert times[:200].mean() > 4 * times[200:].mean() > 0
    assert times[200:].mean() / 200 == pytest.approx(TYPICAL_RATIO, rel=0.3)


@pytest.mark.parametrize("shrink", [0.0, 0.5, 1.0])
def test_the_residual_is_within_its_bound(shrink: float) -> None:
    codec = Variance(alpha=3.0, zeta=0.9, shrink=shrink)
    ranks = Ranks(codec, "residual", "gather", (300,), size=1)
    largest = 0.0
    for step in range(60):
        # Steady, noisy and rare entries, of many sizes.
        g = torch.cat([torch.ones(100), normal(100, seed=step), normal(100, seed=step) ** 9])
        ranks.step(g)
        largest = max(largest, float(g.square().sum()))
        assert ranks.residual().square().sum() <= 3.0 / (1 - 0.9) * largest * 1.0001


def test_sent_plus_left_is_given() -> None:
    ranks = Ranks(Variance(), "residual", "gather", (500,), size=3)
    sent = given = torch.zeros(500)
    for step in range(20):
        grads = [normal(500, seed=3 * step + rank) for rank in range(3)]
        sent, given = sent + ranks.step(*grads), given + sum(grads) / 3
    residual_out = sum(ranks.residual(rank) for rank in range(3)) / 3
    torch.testing.assert_close(sent + residual_out, given, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("memory", ["none", "momentum", "ef21", "ef21-sgdm"])
def test_memories_that_do_not_separate_the_residual_are_refused(memory: str) -> None:
    with pytest.raises(ConfigError, match=f"variance does not go with memory '{memory}': it comp"):
        check_memory(Variance(), parse_memory(memory))


def test_a_residual_is_its_usual_memory() -> None:
    assert wants_residual(Variance())
    for memory in ("residual", "residual:decay=0.9", "lowbit"):
        check_memory(Variance(), parse_memory(memory))


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_the_size_of_a_gradient_does_not_matter(size: float) -> None:
    x = normal(1000)
    assert torch.equal(roundtrip(Variance(), x * size) != 0, roundtrip(Variance(), x) != 0)


@pytest.mark.parametrize("numel", [0, 1, 7])
def test_zeros_and_sizes(numel: int) -> None:
    ranks = Ranks(Variance(), "residual", "gather", (numel,))
    assert torch.equal(ranks.step(*[torch.zeros(numel)] * 2), torch.zeros(numel))
    x = torch.full((numel,), 1.5)
    assert torch.equal(ranks.step(x, x) + ranks.step(x, x), 2 * x)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_appear_and_do_not_stay_in_the_variance(bad: float) -> None:
    ranks = Ranks(Variance(), "residual", "gather", (100,), size=2)
    out = ranks.step(normal(100), with_entry(normal(100), 7, bad))
    assert not out[7].isfinite()
    assert out.isfinite().sum() == 99
    assert all(lane.aggregator_state["spread"].isfinite().all() for lane in ranks.lanes)


def test_bits_on_the_wire() -> None:
    payload = Variance().encode(normal(1_000_000))
    count = int(payload.parts[0])
    # Of normal entries those beyond the root of 3 stand out: 8.3 %.
    assert count == pytest.approx(83_265, rel=0.02)
    # 16 bits of value, and 5.5 of position.
    assert 8 * payload.nbytes / count == pytest.approx(21.6, abs=0.3)


@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
def test_bits_are_near_the_entropy(ratio: float) -> None:
    chance = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0))
    codec, x = Variance(), torch.where(chance < ratio, 1.0, 0.0)
    assert int(codec.encode(x).parts[0]) == x.count_nonzero()
    assert bits_per_entry(codec, x) <= 1.4 * ideal_bits(codec, x)


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    x = with_entry(eighths(1000), 77, 64.0)
    assert wire_hash(Variance(), x) == "ab006316"


def test_bad_messages_are_refused() -> None:
    count, places, values = Variance().encode(normal(1000)).parts
    check = Variance().layout(1000).check
    assert check is not None
    for parts in ((count + 1, places, values), (count - 2000, places, values)):
        with pytest.raises(WireError, match="message"):
            check(parts)
    with pytest.raises(WireError, match="positions"):
        check((count, places * 0, values))


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"alpha": 0.9}, "alpha must be at least 1, got 0.9"),
        ({"alpha": float("inf")}, "alpha must be at least 1, got inf"),
        ({"zeta": 1.0}, r"zeta must be in \(0, 1\), got 1.0"),
        ({"zeta": 0.0}, r"zeta must be in \(0, 1\), got 0.0"),
        ({"shrink": 1.5}, r"shrink must be in \[0, 1\], got 1.5"),
        ({"shrink": float("nan")}, r"shrink must be in \[0, 1\], got nan"),
    ],
)
def test_settings_out_of_range(settings: dict[str, float], rule: str) -> None:
    with pytest.raises(ConfigError, match=f"^variance: {rule}$"):
        Variance(**settings)


def test_every_step_starts_from_what_the_last_has_left() -> None:
    """The variance is the sum of decayed squares since the entry was last sent."""
    codec, ctx = Variance(alpha=100.0, zeta=0.5, shrink=0.5), EncodeContext((4,))
    ranks = Ranks(codec, "residual", "gather", (4,), size=1)
    v = torch.zeros(4)
    for step in range(5):
        g = normal(4, seed=step)
        ranks.step(g)
        v = (v + 0.5 * g.square() + 0.5 * g.square().mean()) * 0.5
    torch.testing.assert_close(ranks.lanes[0].aggregator_state["spread"].square(), v)
    assert codec.state(ctx, CPU)["spread"].count_nonzero() == 0
