"""Jobs of the pipeline tests. Each runs on every rank, in a group of its own."""

import io
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import gradwire
from deadlines import scaled
from gradwire.errors import GradwireError
from gradwire.stages.samples import SampleMemory

WIDTH, ROWS, MICROBATCHES = 24, 16, 4
SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LOOPED = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Two(nn.Module):
    """A stage that passes on a float tensor and a mask, whose gradient is missing."""

    def __init__(self, first: bool, last: bool) -> None:
        nn.Module.__init__(self)
        self.layer, self.first, self.last = nn.Linear(WIDTH, WIDTH), first, last

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        mask = x > 0 if mask is None else mask
        y = torch.tanh(self.layer(x)) * (1 + 0.1 * mask)
        return y if self.last else (y, mask)


def layer(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, torch.randn(ROWS, WIDTH, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Run:
    """A pipeline of this test on all ranks, or on the first few."""

    def __init__(
        self,
        schedule: str = "1f1b",
        make: Callable[[int], nn.Module] = layer,
        timeout_s: float = 40,
        **static: Any,
    ) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        # A group of its own: a step that fails leaves messages behind.
        self.group = dist.new_group(list(range(size)), timeout=timedelta(seconds=timeout_s))
        count = size if schedule in SINGLE else 2 * size
        indices = [rank] if schedule in SINGLE else [rank, rank + size]
        if schedule == "zbv":
            indices = [rank, count - 1 - rank]
        self.modules = [make(index) for index in indices]
        device = torch.device("cpu")
        self.stages = [
            PipelineStage(module, index, count, device, group=self.group, **static)
            for module, index in zip(self.modules, indices, strict=True)
        ]
        if schedule in SINGLE:
            self.schedule: Any = SINGLE[schedule](self.stages[0], MICROBATCHES, loss_fn=loss_of)
        else:
            self.schedule = LOOPED[schedule](self.stages, MICROBATCHES, loss_fn=loss_of)
        self.is_first = any(stage.is_first for stage in self.stages)
        self.is_last = any(stage.is_last for stage in self.stages)
        parameters = [p for module in self.modules for p in module.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.5)

    def step(self, x: Tensor, y: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        self.optimizer.zero_grad()
        arguments = (x,) if self.is_first else ()
        options = {"target": y, "losses": losses} if self.is_last else {}
        self.schedule.step(*arguments, **options)
        return [loss.detach() for loss in losses]

    def grads(self) -> list[Tensor]:
        found = [p.grad for module in self.modules for p in module.parameters()]
        return [torch.zeros(0) if grad is None else grad.clone() for grad in found]


def train(run: Run, steps: int, first: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Returns all losses, and the gradients of the last step."""
    losses = []
    for step in range(first, first + steps):
        losses += run.step(*batch(step))
        run.optimizer.step()
    return losses, run.grads()


def identity_job(schedule: str) -> tuple[bool, bool, int, int]:
    """Returns whether losses and gradients are those of plain pipelining, and bytes of a step."""
    plain = train(Run(schedule), 3)
    run = Run(schedule)
    handle = gradwire.attach_pipeline(run.schedule, "none", "none")
    own = train(run, 3)
    stats = handle.stats()
    handle.detach()
    after = train(run, 1, 3)
    plain_run = Run(schedule)
    expected = train(plain_run, 4)
    same = all(map(torch.equal, plain[0] + plain[1], own[0] + own[1]))
    back = all(map(torch.equal, expected[1], after[1]))
    return same, back, int(stats["sent_bytes"]), int(stats["messages"])  # type: ignore[call-overload]


def error_job(schedule: str, spec: str) -> tuple[float, dict[str, Any]]:
    """Returns the relative error of the gradients of this rank's first step, and statistics."""
    plain = Run(schedule)
    plain.step(*batch(0))
    run = Run(schedule)
    handle = gradwire.attach_pipeline(run.schedule, spec, spec)
    run.step(*batch(0))
    own, expected = (
        torch.cat([g.view(-1) for g in run.grads()]),
        torch.cat([g.view(-1) for g in plain.grads()]),
    )
    return float((own - expected).norm() / expected.norm()), handle.stats()


def two_tensors_job() -> tuple[bool, dict[str, Any]]:
    """Returns whether stages with a mask between them work exactly, and statistics."""
    size = dist.get_world_size()

    def make(index: int) -> nn.Module:
        torch.manual_seed(index)
        return Two(index == 0, index == size - 1)

    plain = train(Run("1f1b", make), 2)
    run = Run("1f1b", make)
    handle = gradwire.attach_pipeline(run.schedule, "none", "none")
    own = train(run, 2)
    return all(map(torch.equal, plain[0] + plain[1], own[0] + own[1])), handle.stats()


def kept_rows(handle: Any) -> dict[str, dict[int, Tensor]]:
    """Returns what the ends of this rank keep, by boundary and sample."""
    found = {}
    for end in [*handle._ends.senders.values(), *handle._ends.receivers.values()]:
        if end.channel.kept is not None:
            found[end.channel.settings.name] = dict(end.channel.kept._kept.get(0, {}))
    return found


def samples_job(
    orders: list[list[int]], values: str
) -> tuple[dict[str, Any], list[float], list[int]]:
    """Returns what is kept, relative errors of activations, and bytes by step."""
    run = Run("1f1b")
    handle = gradwire.attach_pipeline(
        run.schedule, "int4", "int8", memory=SampleMemory(values=values)
    )
    table = torch.randn(100, WIDTH, generator=torch.Generator().manual_seed(5))
    errors, sent = [], []
    for ids in orders:
        handle.samples(ids)
        x = table[ids]
        run.step(x, x.flip(1))
        run.optimizer.step()
        error = 0.0
        for sender in handle._ends.senders.values():
            if sender.channel.kept is not None:
                kept = sender.channel.kept
                error = sender.channel.counts.relative_error or 0.0
                assert kept.known() >= set(ids)
        errors.append(error)
        sent.append(int(handle.metrics()["sent_bytes"]))
    return kept_rows(handle), errors, sent


def resume_job(memory: str | None, controller: str | None) -> bool:
    """Returns whether a run that was saved and loaded goes on bitwise as the one that was not."""
    options: Any = {"memory": memory}
    if controller is not None:
        options["controller"] = gradwire.StageGraVAC(window=2)
    ids = list(range(ROWS))

    def go(run: Run, handle: Any, steps: int, first: int) -> list[Tensor]:
        losses = []
        for step in range(first, first + steps):
            if memory:
                handle.samples(ids)
            losses += run.step(*batch(0 if memory else step))
            run.optimizer.step()
        return losses + [p.detach().clone() for module in run.modules for p in module.parameters()]

    run = Run("1f1b")
    handle = gradwire.attach_pipeline(run.schedule, "qsgd:bits=6", "qsgd:bits=6", **options)
    go(run, handle, 3, 0)
    file = io.BytesIO()
    torch.save([handle.state_dict(), [m.state_dict() for m in run.modules]], file)
    expected = go(run, handle, 3, 3)
    file.seek(0)
    saved, weights = torch.load(file, weights_only=True)
    other = Run("1f1b")
    for module, state in zip(other.modules, weights, strict=True):
        module.load_state_dict(state)
    resumed = gradwire.attach_pipeline(other.schedule, "qsgd:bits=6", "qsgd:bits=6", **options)
    resumed.load_state_dict(saved)
    if controller is not None:
        # Its choices depend on measured times, so only what is loaded can be equal.
        return resumed.state_dict() == saved and handle.state_dict() != saved
    return all(map(torch.equal, expected, go(other, resumed, 3, 3)))


def failure_of(call: Callable[[], object]) -> tuple[str, str]:
    """Returns the class and the text of what a call raises; torch's own errors are no success."""
    try:
        call()
    except GradwireError as error:
        return type(error).__name__, str(error)
    except Exception as error:
        return f"torch: {type(error).__name__}", str(error)
    return "", ""


def changed_shape_job(
    schedule: str, rows: int, width: int
) -> tuple[tuple[str, str], tuple[str, str]]:
    """Returns the errors of a step whose batch has another shape, and of the step after it."""
    run = Run(schedule)
    handle = gradwire.attach_pipeline(run.schedule, "int8", "int4")
    train(run, 2)
    x, y = torch.randn(rows, width), torch.randn(rows, width)
    first = failure_of(lambda: run.step(x, y))
    again = failure_of(lambda: run.step(*batch(0)))
    del handle
    return first, again


def failing_stage_job(failing: int) -> tuple[str, str]:
    """Returns the error of a step in which one stage's module raises."""
    run = Run("gpipe")
    gradwire.attach_pipeline(run.schedule, "int8", "int8")
    train(run, 1)

    def fail(*_: object) -> None:
        raise ValueError("no such token")

    if dist.get_rank() == failing:
        run.modules[0].register_forward_pre_hook(fail)
    return failure_of(lambda: run.step(*batch(1)))


def lost_rank_job() -> tuple[str, str]:
    """Returns the error on rank 0 when rank 1 leaves in the middle of a step."""
    run = Run("gpipe", timeout_s=scaled(6))
    gradwire.attach_pipeline(run.schedule, "int8", "int8")
    train(run, 1)

    def leave(*_: object) -> None:
        dist.destroy_process_group(run.group)
        raise SystemExit

    if dist.get_rank() == 1:
        run.modules[0].register_forward_pre_hook(leave)
        try:
            run.step(*batch(1))
        except SystemExit:
            return "SystemExit", ""
    return failure_of(lambda: run.step(*batch(1)))


def static_shapes_job() -> tuple[str, str]:
    """Returns the error of stages whose declared shapes differ."""
    mine = WIDTH if dist.get_rank() == 0 else WIDTH + 8
    rows = ROWS // MICROBATCHES
    run = Run("1f1b", input_args=torch.empty(rows, mine), output_args=torch.empty(rows, WIDTH))
    gradwire.attach_pipeline(run.schedule, "int8", "int8")
    return failure_of(lambda: run.step(*batch(0)))


def unlike_settings_job() -> list[tuple[str, str]]:
    """Returns the errors of ranks that attach with unlike settings, and name unlike samples."""
    rank = dist.get_rank()
    found = []
    for options in (
        {"activations": "int8" if rank else "int4"},
        {"seed": rank},
        {"memory": "samples" if rank else None},
    ):
        run = Run()
        found.append(failure_of(lambda: gradwire.attach_pipeline(run.schedule, **options)))  # noqa: B023
    run = Run()
    handle = gradwire.attach_pipeline(run.schedule, "int4", memory="samples")
    found.append(failure_of(lambda: handle.samples([rank] * ROWS)))
    found.append(
        failure_of(lambda: handle.switch(activations="int8" if rank else "topk:ratio=0.1"))
    )
    found.append(failure_of(lambda: run.step(*batch(0))))
    return found


def unusual_job() -> dict[str, Any]:
    """Returns what happens with evaluation, a lone stage, a switch, a second handle and others."""
    run, found = Run("gpipe"), dict[str, Any]()
    handle = gradwire.attach_pipeline(run.stages[0], "int8", "int8")
    found["twice"] = failure_of(lambda: gradwire.attach_pipeline(run.schedule))
    train(run, 2)
    found["before"] = int(handle.metrics()["sent_bytes"])
    handle.switch(gradients="none")
    train(run, 1, 2)
    found["after"] = int(handle.metrics()["sent_bytes"])
    found["state"] = failure_of(lambda: handle.load_state_dict({}))
    found["no memory"] = failure_of(lambda: handle.samples([1]))
    handle.detach()
    found["detached"] = failure_of(handle.detach)
    run = Run("1f1b")
    handle = gradwire.attach_pipeline(run.schedule, "int4", "int8", memory="samples")
    x, y = batch(0)
    handle.samples(range(ROWS))
    run.step(x, y)
    kept = {
        name: {i: r.clone() for i, r in rows.items()} for name, rows in kept_rows(handle).items()
    }
    arguments = (x,) if run.is_first else ()
    losses: list[Tensor] = []
    run.schedule.eval(*arguments, **({"target": y, "losses": losses} if run.is_last else {}))
    found["evaluated"] = len(losses)
    now = kept_rows(handle)
    found["unchanged"] = all(
        torch.equal(row, now[name][i]) for name, rows in kept.items() for i, row in rows.items()
    )
    handle.samples(range(ROWS))
    run.step(x, y)
    found["rows"] = failure_of(lambda: (handle.samples(range(3)), run.step(x, y)))
    return found


def controller_job(steps: int, slow: float) -> tuple[list[list[str]], dict[str, Any]]:
    """Returns the methods of all ends after each step, on a link of so many seconds per byte."""
    run = Run("1f1b")
    controller = gradwire.StageGraVAC(window=2, epsilon=0.9)
    handle = gradwire.attach_pipeline(run.schedule, "int4", "int8", controller=controller)
    methods = []
    original = handle._ends.time_link

    def measured(*args: Any) -> Any:
        return original(*args)._replace(byte_s=slow)

    handle._ends.time_link = measured  # type: ignore[method-assign]
    for step in range(steps):
        run.step(*batch(step))
        ends = handle.stats()["boundaries"]
        methods.append([f"{name.split()[-1]} {end['method']}" for name, end in ends.items()])  # type: ignore[attr-defined]
    return methods, handle.stats()
