"""Sample memory (AQ-SGD): both ends keep the same, and the error shrinks as activations settle."""

import pytest
import torch
from torch import Tensor, nn

from gradwire.comm.meter import Meter
from gradwire.errors import ConfigError
from gradwire.stages.boundary import Channel, Receiver, Sender, Settings, StepInfo
from gradwire.stages.method import stage_method
from gradwire.stages.samples import KeptSamples, MicroBatches, SampleMemory, memory_of, read_ids
from gradwire.stages.simulated import SimulatedStages


def pair(spec: str, step: StepInfo) -> tuple[Sender, Receiver]:
    methods = (stage_method("activations", spec),)
    settings = Settings(0, "activations", methods, SampleMemory(), None, 0)
    sender, receiver = (Channel(settings, step, Meter()) for _ in range(2))
    return Sender(sender), Receiver(receiver)


def carry(sender: Sender, receiver: Receiver, x: Tensor, ids: list[int]) -> Tensor:
    """Sends a batch in two micro-batches."""
    step = sender.channel.step
    step.number += 1
    step.samples = MicroBatches(ids, 2)
    sender.begin_step(None)
    receiver.begin_step()
    out = []
    for number, part in enumerate(x.chunk(2)):
        out.append(torch.empty_like(part))
        receiver.post(number, 0, out[-1]).copy_(sender.encode(number, 0, part))
        receiver.fill(number)
    return torch.cat(out)


def test_the_error_shrinks_while_activations_move_slowly() -> None:
    """A single message of 4 bits is off by a tenth; one about a small difference, by far less."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 256, generator=generator)
    ends = pair("int4", StepInfo(microbatches=2))
    errors = []
    for _ in range(6):
        found = carry(*ends, x, list(range(8)))
        errors.append(float((found - x).norm() / x.norm()))
        x = x + 0.05 * torch.randn(x.shape, generator=generator)
    method = ends[0].channel.method
    direct = method.decode(method.encode(x))
    assert (direct - x).norm() > 0.08 * x.norm()
    assert errors[0] == 0, "the first visit is exact"
    assert max(errors[1:]) < 0.01
    kept, received = ends[0].channel.kept, ends[1].channel.kept
    assert kept is not None
    assert received is not None
    for number in range(8):
        assert torch.equal(kept._kept[0][number], received._kept[0][number])


def test_a_new_sample_makes_its_micro_batch_dense() -> None:
    ends = pair("int4", StepInfo(microbatches=2))
    x = torch.randn(4, 8)
    carry(*ends, x, [1, 2, 3, 4])
    carry(*ends, x, [2, 1, 3, 9])
    kept = ends[0].channel.kept
    assert kept is not None
    assert [kept.is_new(0), kept.is_new(1)] == [False, True]
    assert kept.known() == {1, 2, 3, 4, 9}


def test_a_sample_may_occur_twice_in_a_batch() -> None:
    ends = pair("int4", StepInfo(microbatches=2))
    x = torch.randn(4, 8)
    for _ in range(3):
        assert (carry(*ends, x, [5, 5, 5, 6]) - x).norm() <= 2 * x.norm()
    kept, received = ends[0].channel.kept, ends[1].channel.kept
    assert kept is not None
    assert received is not None
    assert torch.equal(kept._kept[0][5], received._kept[0][5])


def test_state_is_restored() -> None:
    kept = KeptSamples(SampleMemory(values="fp16"))
    values = kept.keep(0, [3, 1], torch.randn(2, 5))
    other = KeptSamples(SampleMemory(values="fp16"))
    other.load(kept.state())  # type: ignore[arg-type]
    assert torch.equal(other.rows(0, [1, 3], (2, 5)), values.flip(0))
    assert kept.nbytes_with([1, 2]) == 3 * 5 * 2


@pytest.mark.parametrize("given", [None, "abc", [], [1.5], [True], [-1], [1 << 63], 3])
def test_numbers_of_samples_are_checked(given: object) -> None:
    with pytest.raises(ConfigError, match="samples: expected"):
        read_ids(given)


def test_settings_are_checked() -> None:
    assert read_ids(torch.arange(3)) == [0, 1, 2]
    assert memory_of("samples") == SampleMemory()
    with pytest.raises(ConfigError, match=r"memory must be 'samples'.*got 'residual'"):
        memory_of("residual")
    with pytest.raises(ConfigError, match="samples: values must be one of"):
        SampleMemory(values="int8")
    with pytest.raises(ConfigError, match="samples: max_bytes must be at least 1, got 0"):
        SampleMemory(max_bytes=0)
    kept = KeptSamples(SampleMemory())
    with pytest.raises(ConfigError, match="2 rows and 3 samples"):
        kept.keep(0, [1, 2, 3], torch.zeros(2, 4))


def test_stages_in_one_process_pass_gradients_through() -> None:
    """With an exact method they change nothing; bytes are two directions of every micro-batch."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(4)]
    model, x = nn.Sequential(*layers), torch.randn(8, 16)
    model(x).square().mean().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    none = stage_method("activations", "none")
    stages = SimulatedStages(layers, 3, {"activations": none, "gradients": none}, 1)
    model.zero_grad()
    stages.begin_step()
    model(x).square().mean().backward()
    for p, expected in zip(model.parameters(), plain, strict=True):
        assert torch.equal(p.grad, expected)  # type: ignore[arg-type]
    for direction in ("activations", "gradients"):
        assert stages.sent_bytes(direction) == (2 * (32 + 8 * 16 * 4), 2 * 8 * 16 * 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="stages must be 2 to 4, got 5"):
        SimulatedStages(layers, 5, {"activations": none, "gradients": none}, 1)
