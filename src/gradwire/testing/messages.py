"""Properties of a compressor's messages."""

import json
from dataclasses import replace
from inspect import getdoc
from typing import Any, get_args

import torch
from torch import Tensor

from gradwire.base import Compressor, Family, OneRound
from gradwire.compressors._nested import NestedSelection
from gradwire.compressors._sparsifier import Pipeline
from gradwire.errors import ConfigError, WireError
from gradwire.identity import identity_of, is_own
from gradwire.registry import plugin_name
from gradwire.spec import compressor_classes, format_spec, parse
from gradwire.testing.case import expect
from gradwire.types import EncodeContext, Payload
from gradwire.wire.layout import pack, unpack

MANY = 1_000_003
"""Odd, and no multiple of any bucket, block or chunk."""


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def describes_itself(compressor: Compressor) -> None:
    """The class has a docstring, examples, a family, a paper and its message in words."""
    cls = type(compressor)
    if isinstance(compressor, Pipeline):
        return
    for name in ("examples", "family", "paper", "message"):
        expect(bool(getattr(cls, name, None)), f"{cls.__name__}.{name} is missing or empty")
    families = get_args(Family)
    expect(cls.family in families, f"family must be one of {families}, got {cls.family!r}")
    expect(bool(getdoc(cls)), f"{cls.__name__} has no docstring")
    for example in cls.examples:
        cls(**example)


def can_be_compared(compressor: Compressor) -> None:
    """Ranks and saved states can compare its parameters; its spec, if it has one, reads back."""
    json.dumps(identity_of(compressor))
    equal = replace(compressor)  # type: ignore[type-var]
    expect(compressor == equal and hash(compressor) == hash(equal), "an equal copy is not equal")
    stages: tuple[Compressor, ...] = (compressor,)
    if isinstance(compressor, Pipeline):
        stages = compressor.sparsifier, compressor.quantiser
    if isinstance(stages[0], NestedSelection):
        stages = stages[0].outer, stages[0].inner, *stages[1:]
    if all(is_own(type(stage)) or plugin_name(type(stage)) for stage in stages):
        text = format_spec(compressor)
        expect(parse(text) == compressor, f"{text!r} reads back as {parse(text)}")
        expect(parse(json.loads(json.dumps(text))) == compressor, f"{text!r} is no JSON text")


def traits_and_layouts_are_computed_once(compressor: Compressor) -> None:
    """Steps ask for traits and layouts over and over; equal settings share one result."""
    equal = replace(compressor)  # type: ignore[type-var]
    advice = "is computed at every call; mark it @memoized"
    expect(compressor.traits() is equal.traits(), f"traits {advice}")
    if isinstance(compressor, OneRound) and isinstance(equal, OneRound):
        expect(compressor.layout(1000) is equal.layout(1000), f"layout {advice}")


def nbytes_is_what_is_sent(compressor: Compressor) -> None:
    """`nbytes`, the payload's length and the packed bytes are the same number."""
    for numel in (0, 1, 7, 130, 5000):
        payload = compressor.encode(normal(numel, 1))
        stated = compressor.nbytes((numel, 1))
        if not compressor.traits().variable_length:
            expect(
                payload.nbytes == stated, f"{numel} entries: {payload.nbytes} bytes, not {stated}"
            )
        if isinstance(compressor, OneRound):
            packed = pack([payload.parts], [compressor.layout(numel)]).numel()
            expect(packed == payload.nbytes, f"{numel} entries: packed to {packed} bytes")


def packed_decodes_to_the_same(compressor: Compressor) -> None:
    """A message that was packed into bytes and unpacked decodes to the same tensor."""
    x = normal(1000, 3)
    payload = compressor.encode(x)
    decoded = compressor.decode(payload)
    expect(decoded.shape == x.shape, f"shape {tuple(x.shape)} became {tuple(decoded.shape)}")
    if isinstance(compressor, OneRound):
        layout = compressor.layout(x.numel())
        [parts] = unpack(pack([payload.parts], [layout]), [layout])
        again = compressor.decode(replace(payload, parts=parts))
        expect(torch.equal(decoded, again), "the unpacked message decodes to something else")


def same_context_same_bytes(compressor: Compressor) -> None:
    """Encoding is a function of the tensor, the parameters and the context."""
    x = normal(50, 40)
    ctx = EncodeContext((50, 40), rank=1, world_size=3, seed=7, lane_id=5, step=2)
    one, two = compressor.encode(x, ctx), compressor.encode(x, ctx)
    same = all(torch.equal(a, b) for a, b in zip(one.parts, two.parts, strict=True))
    expect(same, "two messages about the same tensor differ")


def contraction_is_closer_than_zero(compressor: Compressor) -> None:
    """With the trait `contraction`, a decoded message is closer to its input than zero is."""
    if not compressor.traits().contraction:
        return
    generator = torch.Generator().manual_seed(0)
    errors = []
    for step in range(20):
        x = torch.randn(64, 32, generator=generator)
        decoded = compressor.decode(compressor.encode(x, EncodeContext((64, 32), step=step)))
        errors.append(float((x - decoded).square().sum() / x.square().sum()))
    mean = sum(errors) / len(errors)
    expect(mean < 1, f"the squared error is {mean:.3g} times the squared norm")


def unbiased_is_exact_on_average(compressor: Compressor) -> None:
    """With the trait `unbiased`, the mean of 1000 decoded messages is the input, but for noise."""
    if not compressor.traits().unbiased:
        return
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, generator=generator)
    contexts = [EncodeContext((300,), step=step) for step in range(1000)]
    draws = torch.stack([compressor.decode(compressor.encode(x, ctx)) for ctx in contexts])
    # Sums over entries are close to normal, where one entry's rounding need not be.
    directions = torch.stack([x, torch.ones(300), *torch.randn(8, 300, generator=generator)], dim=1)
    sums = draws @ directions
    error = (sums.mean(dim=0) - x @ directions).abs()
    limit = 4 * sums.std(dim=0) / sums.shape[0] ** 0.5 + 1e-4
    worst = float((error / limit).max())
    expect(worst <= 1, f"a sum of entries is off by {worst:.3g} times four standard errors")


def many_entries(compressor: Compressor) -> None:
    """A million entries and three are encoded and decoded."""
    x = normal(MANY)
    payload = compressor.encode(x)
    decoded = compressor.decode(payload)
    expect(decoded.shape == x.shape, f"the shape became {tuple(decoded.shape)}")
    expect(bool(decoded.isfinite().all()), "the decoded message is not finite")
    expect(bool(decoded.any()), "the decoded message is zero")
    if not compressor.traits().variable_length:
        stated = compressor.nbytes((MANY,))
        expect(payload.nbytes == stated, f"the message has {payload.nbytes} bytes, not {stated}")
    if compressor.traits().contraction:
        expect(bool((decoded - x).norm() < x.norm()), "the error is as large as the input")


def foreign_messages_are_refused(compressor: Compressor) -> None:
    """`decode` raises WireError for a message of another form: kernels trust its lengths."""
    x = normal(100, 10)
    own = compressor.encode(x)
    refusals = 0
    for other in compressor_classes().values():
        payload = other(**other.examples[0]).encode(x)
        if [(p.dtype, p.shape) for p in payload.parts] != [(p.dtype, p.shape) for p in own.parts]:
            # Where lengths may vary, another message may happen to have a valid form.
            varies = compressor.traits().variable_length
            refused = _refuses(compressor, payload)
            expect(refused or varies, f"a message of {other.__name__} is decoded")
            refusals += refused
    expect(refusals > len(compressor_classes()) // 2, f"only {refusals} methods' are refused")
    extended = Payload((*own.parts, torch.zeros(1)), own.ctx, own.nbytes)
    expect(_refuses(compressor, extended), "a message with one part more is decoded")


def _refuses(compressor: Compressor, payload: Payload) -> bool:
    try:
        compressor.decode(payload)
    except WireError:
        return True
    return False


def other_objects_are_refused(compressor: Compressor) -> None:
    """`encode` of what is no tensor, and `decode` of what is no payload, raise ConfigError."""
    for given in ([1.0, 2.0], normal(8).numpy(), None):
        kind = type(given).__name__
        text = _refusal(compressor.encode, given)
        expect(f"got {kind}" in text, f"encode of a {kind} gives no ConfigError that names it")
    text = _refusal(compressor.decode, normal(8))
    expect("expected what encode returns" in text, "decode of a tensor gives no ConfigError")


def _refusal(function: Any, given: object) -> str:
    try:
        function(given)
    except ConfigError as error:
        return str(error)
    return ""


PROPERTIES = (
    describes_itself,
    can_be_compared,
    traits_and_layouts_are_computed_once,
    nbytes_is_what_is_sent,
    packed_decodes_to_the_same,
    same_context_same_bytes,
    contraction_is_closer_than_zero,
    unbiased_is_exact_on_average,
    foreign_messages_are_refused,
    other_objects_are_refused,
    many_entries,
)
