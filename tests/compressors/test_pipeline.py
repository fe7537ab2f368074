"""Pipelines: one method chooses entries, another writes their values."""

from itertools import product

import pytest
import torch
from few_ranks import Ranks, eighths, normal, roundtrip, squared_error, wire_hash, with_entry
from torch import Tensor

from gradwire.base import Compressor, OneRound
from gradwire.compressors._sparsifier import Pipeline, Sparsifier
from gradwire.compressors.qsgd import QSGD
from gradwire.compressors.sign import Sign
from gradwire.compressors.topk import TopK
from gradwire.engine.legality import wants_residual
from gradwire.engine.make_plan import make_plan
from gradwire.errors import ConfigError
from gradwire.spec import compressor_classes, format_spec, parse
from gradwire.types import EFInput, EncodeContext
from gradwire.wire.indices import unpack_index

ALL = [
    f"{first} | {second}"
    for first in ("topk:ratio=0.1", "randomk:ratio=0.1")
    for second in ("none", "fp16", "bf16", "efsign", "sign", "qsgd", "qsgd:bits=2,scaled=true")
]


def pipeline(spec: str) -> Pipeline:
    built = parse(spec)
    assert isinstance(built, Pipeline)
    return built


def test_chosen_values_are_quantised_by_hand() -> None:
    """The two largest are -4 and 3: their signs, and 3.5 for both."""
    x = torch.tensor([1.0, -4.0, 2.0, 3.0])
    index, bits, scale = pipeline("topk:ratio=0.5 | efsign").encode(x).parts
    assert unpack_index(index, 4, 2).tolist() == [1, 3]
    assert bits.tolist() == [0b01]
    assert scale.tolist() == [3.5]
    assert roundtrip(pipeline("topk:ratio=0.5 | efsign"), x).tolist() == [0.0, -3.5, 0.0, 3.5]


def test_random_positions_do_not_travel_in_a_pipeline_either() -> None:
    parts = pipeline("randomk:ratio=0.1 | efsign").encode(normal(1000)).parts
    assert [part.numel() for part in parts] == [13, 1]


@pytest.mark.parametrize("second", ["fp16", "bf16"])
def test_a_format_as_quantiser_is_the_format_of_values(second: str) -> None:
    x = normal(1000)
    plain = parse(f"topk:ratio=0.1,values={second}")
    assert isinstance(plain, OneRound)
    assert wire_hash(pipeline(f"topk:ratio=0.1 | {second}"), x) == wire_hash(plain, x)


@pytest.mark.parametrize("spec", ALL)
def test_only_chosen_entries_are_sent(backend: str, spec: str) -> None:
    x = normal(1000)
    codec = pipeline(spec)
    out = roundtrip(codec, x)
    chosen = codec.sparsifier.select(EFInput(x), EncodeContext((1000,)))
    rest = torch.ones(1000, dtype=torch.bool)
    rest[chosen] = False
    assert torch.equal(out[rest], torch.zeros(900))
    assert out[chosen].count_nonzero() > 0


def test_entries_are_unbiased_where_the_quantiser_is() -> None:
    x = normal(500)
    codec = pipeline("topk:ratio=0.1 | qsgd:bits=2")
    kept = roundtrip(pipeline("topk:ratio=0.1 | none"), x)
    decoded = torch.stack([roundtrip(codec, x, EncodeContext((500,), step=s)) for s in range(500)])
    total = (decoded @ kept).double()
    assert abs(total.mean() - kept.double() @ kept.double()) < 4 * total.std() / 500**0.5


def test_errors_add_up() -> None:
    """The losses of the first and the rounding of the second are at different positions."""
    x = normal(1000)
    codec = pipeline("topk:ratio=0.1 | qsgd:bits=4")
    kept = roundtrip(pipeline("topk:ratio=0.1 | none"), x)
    out = roundtrip(codec, x)
    lost = squared_error(x, kept)
    rounded = float((kept - out).square().sum() / x.square().sum())
    assert squared_error(x, out) == pytest.approx(lost + rounded, rel=1e-5)


@pytest.mark.parametrize(
    ("spec", "summable", "contraction", "unbiased"),
    [
        ("topk:ratio=0.1 | qsgd:bits=4", False, True, False),
        ("topk:ratio=0.1 | qsgd:bits=2", False, False, False),
        ("randomk:ratio=0.1 | bf16", True, True, False),
        ("randomk:ratio=0.1 | efsign", False, True, False),
    ],
)
def test_traits_are_those_of_both(
    spec: str, summable: bool, contraction: bool, unbiased: bool
) -> None:
    traits = pipeline(spec).traits()
    assert (traits.summable, traits.contraction, traits.unbiased) == (
        summable,
        contraction,
        unbiased,
    )
    assert wants_residual(pipeline(spec)) == contraction


def test_summable_pipelines_may_be_added_up_on_the_way() -> None:
    grads = [eighths(1000).roll(rank) for rank in range(4)]
    mean = Ranks("randomk:ratio=0.1 | bf16", "none", "mean", (1000,), size=4).step(*grads)
    gather = Ranks("randomk:ratio=0.1 | bf16", "none", "gather", (1000,), size=4).step(*grads)
    torch.testing.assert_close(mean, gather, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("spec", [spec for spec in ALL if spec.startswith("topk")])
def test_non_finite_entries_appear(backend: str, spec: str, exchange_name: str, bad: float) -> None:
    ranks = Ranks(spec, "none", exchange_name, (200,), size=2)
    out = ranks.step(with_entry(normal(200), 7, bad), normal(200))
    assert not out[7].isfinite()


def test_bits_on_the_wire() -> None:
    codec = pipeline("topk:ratio=0.01 | qsgd:bits=4")
    payload = codec.encode(normal(1_000_000))
    # 8.57 bits of position, 4 of value and a quarter for the scale.
    assert 8 * payload.nbytes / 10_000 == pytest.approx(12.83, abs=0.02)
    payload = pipeline("topk:ratio=0.01 | sign").encode(normal(1_000_000))
    assert 8 * payload.nbytes / 10_000 == pytest.approx(9.57, abs=0.02)


D, K = 256, 16


def shapes() -> list[Tensor]:
    """Even, uneven, very uneven, and as uneven as can be."""
    spike = torch.zeros(D)
    spike[5] = -3.0
    return [torch.ones(D), normal(D), normal(D) ** 9, spike]


def mean_error(codec: Compressor, x: Tensor) -> tuple[float, float]:
    """The mean squared error over 200 draws, and four of its standard errors."""
    errors = torch.tensor(
        [squared_error(x, roundtrip(codec, x, EncodeContext((D,), step=s))) for s in range(200)]
    )
    return float(errors.mean()), float(4 * errors.std() / 200**0.5)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("scaled", [False, True])
def test_q_top_k_meets_its_error_bound(bits: int, scaled: bool) -> None:
    """By (1 - b) k/d unscaled, where b is below 1, and by k/d/(1 + b) scaled, for any b."""
    quantiser = QSGD(bits=bits, bucket=K, norm="l2", scaled=scaled)
    codec, b = Pipeline(TopK(ratio=K / D), quantiser), quantiser.variance()
    assert codec.traits().contraction == (scaled or b < 1)
    if not codec.traits().contraction:
        return
    share = K / D / (1 + b) if scaled else (1 - b) * K / D
    for x in shapes():
        error, noise = mean_error(codec, x)
        assert error <= 1 - share + noise + 1e-6


@pytest.mark.parametrize("norm", range(1, 7))
def test_sign_top_k_meets_its_error_bound(norm: int) -> None:
    codec = Pipeline(TopK(ratio=K / D), Sign(norm=norm))
    for x in shapes():
        share = K ** (2 / norm - 1) / D if norm > 1 else 1 / D
        if norm == 1:
            evenness = float(x.double().abs().sum() ** 2 / D / x.double().square().sum())
            share = max(share, K / D * evenness)
        assert squared_error(x, roundtrip(codec, x)) <= 1 - share + 1e-6


def test_scaled_is_smaller_but_never_too_large() -> None:
    """With two bits in one bucket, unscaled rounding is further away than zero."""
    x = normal(1000)
    plain, scaled = QSGD(bits=2, bucket=1000), QSGD(bits=2, bucket=1000, scaled=True)
    assert squared_error(x, roundtrip(plain, x)) > 1 > squared_error(x, roundtrip(scaled, x))
    factor = 1 + plain.variance()
    torch.testing.assert_close(roundtrip(scaled, x) * factor, roundtrip(plain, x))


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
def test_scaled_leaves_what_it_has_not_sent(exchange_name: str) -> None:
    ranks = Ranks("qsgd:bits=2,scaled=true", "residual", exchange_name, (300,), size=1)
    x = normal(300)
    out = ranks.step(x)
    server = ranks.lanes[0].aggregator_state.get("server", torch.zeros(300))
    torch.testing.assert_close(out + ranks.residual() + server, x)


def usual(kind: type[Compressor]) -> list[Compressor]:
    found = [cls(**cls.examples[0]) for cls in compressor_classes().values()]
    return [method for method in found if isinstance(method, kind)]


@pytest.mark.parametrize("first", usual(Sparsifier), ids=format_spec)
def test_any_sparsifier_goes_before_any_quantiser(first: Sparsifier) -> None:
    seconds = [method for method in usual(OneRound) if not isinstance(method, Sparsifier)]
    assert len(seconds) > 10
    for second in seconds:
        built = parse(f"{format_spec(first)} | {format_spec(second)}")
        assert built == Pipeline(first, second)
        one, two, both = first.traits(), second.traits(), built.traits()
        assert both.contraction == (one.contraction and two.contraction)
        assert both.unbiased == (one.unbiased and two.unbiased)
        assert both.variable_length == (one.variable_length or two.variable_length)
        assert both.is_vote == two.is_vote
        plan = make_plan(built, None, "auto", [torch.zeros(64, 64)], 4)
        assert (format_spec(plan.memory) == "residual") == wants_residual(built)
        if not both.contraction:
            with pytest.raises(ConfigError, match=r"does not go with memory 'residual'.*: ."):
                make_plan(built, "residual", "auto", [torch.zeros(64, 64)], 4)


def test_nothing_else_makes_a_pipeline() -> None:
    """Only sparsifiers can be first; sparsifiers and methods of several rounds cannot be second."""
    methods = usual(Compressor)
    sparse = [m for m in methods if isinstance(m, Sparsifier)]
    dense = [m for m in methods if isinstance(m, OneRound) and m not in sparse]
    refused = 0
    for one, two in product(methods, methods):
        if one in sparse and two in dense:
            continue
        with pytest.raises(ConfigError, match=r"a pipeline (starts|ends) with"):
            parse(f"{format_spec(one)} | {format_spec(two)}")
        refused += 1
    assert refused == len(methods) ** 2 - len(sparse) * len(dense)


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(Pipeline(TopK(ratio=0.5), QSGD(bits=4)), eighths(1000)) == "35fd457f"
    assert wire_hash(pipeline("randomk:ratio=0.5 | efsign"), eighths(1024)) == "690f22e6"
