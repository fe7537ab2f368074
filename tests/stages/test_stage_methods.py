"""Methods and messages between stages, without processes: lengths, refusals, hostile bytes."""

import pytest
import torch

from gradwire.comm.meter import Meter
from gradwire.errors import ConfigError, PeerError, WireError
from gradwire.spec import compressor_classes, format_spec, parse
from gradwire.stages import message
from gradwire.stages.boundary import Channel, Receiver, Sender, Settings, StepInfo
from gradwire.stages.message import HEADER_BYTES, LEAST_BYTES
from gradwire.stages.method import Form, body_bytes, stage_method

FORM = Form((8, 32), torch.float32)


def pair(spec: str, step: StepInfo | None = None, lower: int = 0) -> tuple[Sender, Receiver]:
    """Returns both ends of a boundary in one process."""
    step = step or StepInfo(number=1, microbatches=2)
    methods = (stage_method("activations", spec),)
    settings = Settings(lower, "activations", methods, None, None, 7)
    sender, receiver = (Channel(settings, step, Meter()) for _ in range(2))
    return Sender(sender), Receiver(receiver)


def carry(sender: Sender, receiver: Receiver, x: torch.Tensor) -> torch.Tensor:
    target = torch.empty_like(x)
    receiver.post(0, 0, target).copy_(sender.encode(0, 0, x))
    receiver.fill(0)
    return target


REFUSED = {
    "powersgd:rank=2": "each message must stand alone",
    "signsgd": "sends votes",
    "threshold:value=0.1": "whose length only the sender knows",
    "threelc": "2.0 times the bytes of the tensor",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_methods_that_do_not_apply_are_refused_by_name(spec: str) -> None:
    with pytest.raises(ConfigError, match=f"attach_pipeline: gradients: .*{REFUSED[spec]}"):
        stage_method("gradients", spec)


def usable() -> list[str]:
    """Returns all methods of the catalogue that apply, in their usual setting."""
    found = []
    for name, cls in compressor_classes().items():
        spec = format_spec(cls(**cls.examples[0])) if cls.examples else name
        try:
            stage_method("activations", spec)
        except ConfigError:
            continue
        found.append(spec)
    return found


def test_most_of_the_catalogue_applies() -> None:
    assert {"none", "int4", "fp16"} < set(usable())
    assert len(usable()) > 20


@pytest.mark.parametrize("spec", [*usable(), "topk:ratio=0.1 | qsgd:bits=4"])
def test_both_ends_of_every_method_agree(spec: str) -> None:
    x = torch.randn(FORM.shape, generator=torch.Generator().manual_seed(1))
    sender, receiver = pair(spec)
    found = carry(sender, receiver, x)
    method = parse(spec)
    assert found.isfinite().all()
    if method.traits().contraction and not method.traits().unbiased:
        assert (found - x).norm() < x.norm()
    zeros, _ = carry(*pair(spec), torch.zeros_like(x)), None
    assert not zeros.any(), "a gradient that is missing is sent as zeros"
    counted = sender.channel.counts.nbytes
    body = body_bytes(stage_method("activations", spec), FORM)
    assert counted == max(LEAST_BYTES, HEADER_BYTES + body)
    assert sender.channel.meter.sent_bytes == receiver.channel.meter.received_bytes == counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_an_exact_method_and_whole_numbers_keep_every_bit(dtype: torch.dtype) -> None:
    x = (100 * torch.randn(FORM.shape, dtype=torch.float64)).to(dtype)
    assert torch.equal(carry(*pair("none"), x), x)
    if not dtype.is_floating_point:
        assert torch.equal(carry(*pair("int4"), x), x)
    else:
        found = carry(*pair("int8"), x)
        assert found.dtype == dtype
        assert (found - x).norm() < 0.01 * x.norm()


def test_a_tensor_of_another_shape_is_refused_at_both_ends() -> None:
    sender, receiver = pair("int8")
    carry(sender, receiver, torch.randn(FORM.shape))
    text = r"stages 0 and 1, activations: tensor 0 has changed from \(8, 32\) of float32"
    with pytest.raises(ConfigError, match=text):
        sender.encode(0, 0, torch.randn(9, 32))
    with pytest.raises(ConfigError, match=text):
        receiver.post(0, 0, torch.randn(8, 32, dtype=torch.float64))


def test_random_methods_draw_new_numbers_at_every_step_and_boundary() -> None:
    x = torch.randn(FORM.shape)
    one, other = StepInfo(number=1, microbatches=2), StepInfo(number=2, microbatches=2)
    first = carry(*pair("qsgd:bits=4", one), x)
    assert torch.equal(first, carry(*pair("qsgd:bits=4", one), x))
    assert not torch.equal(first, carry(*pair("qsgd:bits=4", other), x))
    assert not torch.equal(first, carry(*pair("qsgd:bits=4", one, lower=1), x))


def received(change: dict[int, int], spec: str = "int8") -> None:
    """Receives a message in which some words of the header were replaced."""
    sender, receiver = pair(spec)
    target = torch.empty(FORM.shape)
    wire = receiver.post(0, 0, target)
    wire.copy_(sender.encode(0, 0, torch.randn(FORM.shape)))
    for word, value in change.items():
        wire[4 * word : 4 * word + 4].view(torch.int32)[0] = value
    receiver.fill(0)


def test_messages_that_do_not_fit_are_refused() -> None:
    received({})
    with pytest.raises(WireError, match="begins with 0x1"):
        received({0: 1})
    with pytest.raises(WireError, match="announces -5 bytes"):
        received({6: -5})
    with pytest.raises(WireError, match="announces 100000 bytes"):
        received({6: 100000})
    with pytest.raises(WireError):
        received({6: 7})
    with pytest.raises(WireError, match="announces setting 3 of 1"):
        received({3: 3})
    for word, text in ((1, "a tensor of"), (2, "setting 9"), (4, "step 9"), (5, "micro-batch 9")):
        with pytest.raises(PeerError, match=f"received .*{text}.* out of step"):
            received({word: message.RAW if word == 1 else 9})
    for seed in range(50):
        sender, receiver = pair("topk:ratio=0.1")
        wire = receiver.post(0, 0, torch.empty(FORM.shape))
        wire.copy_(sender.encode(0, 0, torch.randn(FORM.shape)))
        generator = torch.Generator().manual_seed(seed)
        body = wire[HEADER_BYTES:]
        body[torch.randint(len(body), (20,), generator=generator)] ^= 0xA5
        try:
            receiver.fill(0)
        except WireError:
            continue


def test_a_stage_that_failed_sends_its_reason() -> None:
    device = torch.device("cpu")
    for error, kind, text in (
        (ConfigError("rows: too many"), ConfigError, "rows: too many"),
        (PeerError("lost"), PeerError, "lost"),
        (ValueError("x" * 1000), PeerError, "stage 2 failed: ValueError: xxx"),
    ):
        notice = message.failure(error, 3, "stage 2", device)
        assert HEADER_BYTES < notice.numel() <= LEAST_BYTES
        room = message.room(5000, device)
        room[: notice.numel()] = notice
        with pytest.raises(kind, match=text):
            message.read(room)
    with pytest.raises(WireError, match="begins with 0x0"):
        message.read(message.room(64, device))
    with pytest.raises(WireError, match="shorter than its header"):
        message.read(torch.zeros(8, dtype=torch.uint8))
