"""Jobs of the reliability tests. Each runs on every rank."""

from pathlib import Path
from typing import Any, cast

import ddp_jobs as jobs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.comm.process_group import Begun


def _model() -> DDP:
    return DDP(jobs.mlp(), bucket_cap_mb=0.01)


def _backward(model: DDP, step: int, bad: float, layer: str) -> None:
    """Runs a backward pass in which rank 1's gradient of one layer has a bad entry."""
    if dist.get_rank() != 1:
        jobs.loss_of(model, step).backward()
        return
    parameter = dict(model.module.named_parameters())[layer]

    def corrupt(grad: Tensor) -> Tensor:
        changed = grad.clone()
        changed.view(-1)[-1] = bad
        return changed

    handle = parameter.register_hook(corrupt)
    try:
        jobs.loss_of(model, step).backward()
    finally:
        handle.remove()


def overflow_job(spec: str, bad: float, layer: str) -> tuple[bool, bool, Tensor]:
    """Returns whether gradients are non-finite, whether state is unchanged, and final weights."""
    model = _model()
    link = gradwire.attach(model, spec)
    jobs.train(model, 2)
    before: Any = link.state_dict()
    model.zero_grad()
    _backward(model, 2, bad, layer)
    seen = any(not g.isfinite().all() for g in jobs.grads(model).values())
    after: Any = link.state_dict()
    model.zero_grad()
    jobs.train(model, 2, first=3)
    link.detach()
    return seen, _same(before, after), jobs.weights(model)


def without_overflow_job(spec: str) -> Tensor:
    """Runs the same steps without the bad one."""
    model = _model()
    link = gradwire.attach(model, spec)
    jobs.train(model, 2)
    jobs.train(model, 2, first=3)
    link.detach()
    return jobs.weights(model)


def raise_job() -> tuple[str, str]:
    model = _model()
    link = gradwire.attach(model, "topk:ratio=0.1", nan_policy="raise")
    jobs.train(model, 1)
    text = jobs.failure_of(lambda: _backward(model, 1, float("nan"), "0.weight"))
    model.zero_grad()
    jobs.train(model, 1, first=2)
    steps = f"{link.stats()['steps']} steps, {link.stats()['skipped']} skipped"
    link.detach()
    return text, steps


def scaled_job(spec: str, scaled: bool) -> tuple[Tensor, float]:
    """Runs eight steps, possibly with a loss scale that halves at step 3 and grows at 2 and 5."""
    model = _model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3, enabled=scaled)
    link = gradwire.attach(model, spec, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        loss = scaler.scale(jobs.loss_of(model, step))
        if step == 3 and dist.get_rank() == 2:
            loss = loss * float("inf")
        loss.backward()
        if step == 3 and not scaled:
            continue
        scaler.step(optimizer)
        scaler.update()
    assert link.stats()["steps"] == 7
    assert link.stats()["skipped"] == 1
    link.detach()
    return jobs.weights(model), scaler.get_scale()


def distributed_checkpoint_job(folder: str) -> tuple[bool, bool]:
    """Returns whether a run resumed by torch.distributed.checkpoint is the same on every rank."""
    model = _model()
    link = gradwire.attach(model, "topk:ratio=0.1")
    jobs.train(model, 3)
    residuals = _residuals(link)
    dcp.save({"model": model.module.state_dict(), "link": link.state_dict()}, checkpoint_id=folder)
    jobs.train(model, 2, first=3)
    link.detach()

    fresh = _model()
    link = gradwire.attach(fresh, "topk:ratio=0.1")
    jobs.train(fresh, 1)
    state = {"model": fresh.module.state_dict(), "link": link.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    fresh.module.load_state_dict(state["model"])
    link.load_state_dict(state["link"])
    mine = torch.equal(residuals, _residuals(link))
    jobs.train(fresh, 2, first=3)
    link.detach()
    return mine, torch.equal(jobs.weights(model), jobs.weights(fresh))


def saved_by_rank_zero_job(folder: str) -> str:
    """Returns the error where only rank 0 saved a file, as in many scripts."""
    model = _model()
    link = gradwire.attach(model, "topk:ratio=0.1")
    jobs.train(model, 1)
    file = Path(folder) / "state.pt"
    if dist.get_rank() == 0:
        torch.save(link.state_dict(), file)
    dist.barrier()
    state = torch.load(file, weights_only=True)
    text = jobs.failure_of(lambda: link.load_state_dict(state))
    link.detach()
    return text


def two_models_job() -> list[tuple[int, bool]]:
    """Returns steps of two links, and whether any was late, where the second one's pass raises."""
    models = [_model(), _model()]
    links = [gradwire.attach(m, "topk:ratio=0.1", nan_policy="raise") for m in models]
    for step in range(5):
        for model in models:
            model.zero_grad()
        losses = [jobs.loss_of(model, step) for model in models]
        if step == 1 and dist.get_rank() == 0:
            losses[1] = losses[1] * float("inf")
        try:
            (losses[0] + losses[1]).backward()
        except gradwire.NonFiniteError:
            assert step == 1
    found = [(cast(int, link.stats()["steps"]), link._pass.has_begun) for link in links]
    for link in links:
        link.detach()
    return found


def loaded_by_some_job() -> tuple[str, bool]:
    """Returns all ranks' errors where rank 1 loads another step, and whether state is unchanged."""
    model = _model()
    link = gradwire.attach(model, "topk:ratio=0.1")
    states = []
    for step in range(3):
        jobs.train(model, 1, first=step)
        states.append(link.state_dict())
    text = jobs.failure_of(lambda: link.load_state_dict(states[dist.get_rank() == 1]))
    same = _same(states[2], link.state_dict())
    link.detach()
    return text, same


def resized_job(residuals: str) -> tuple[Tensor, Tensor, Tensor]:
    """Saves on four ranks, loads on two; returns residuals before and after, and weights."""
    model = _model()
    link = gradwire.attach(model, "topk:ratio=0.1")
    jobs.train(model, 3)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, link.state_dict())
    module = {k: v.clone() for k, v in model.module.state_dict().items()}
    before = _residuals(link)
    link.detach()
    pair = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return before, torch.zeros_like(before), torch.zeros(0)
    fresh = DDP(jobs.mlp(), process_group=pair)
    link = gradwire.attach(fresh, "topk:ratio=0.1")
    fresh.module.load_state_dict(module)
    link.load_resized(states, residuals=residuals)  # type: ignore[arg-type]
    after = _residuals(link)
    jobs.train(fresh, 2, first=3)
    link.detach()
    return before, after, jobs.weights(fresh)


def drift_job(flip: bool) -> str:
    """Flips one bit of one parameter on rank 2, between two comparisons."""
    model = _model()
    link = gradwire.attach(model, "topk:ratio=0.1", check_every=2)
    jobs.train(model, 3)
    if flip and dist.get_rank() == 2:
        with torch.no_grad():
            model.module[2].weight.view(torch.int32)[5, 7] ^= 1
    text = jobs.failure_of(lambda: jobs.train(model, 1, first=3))
    if not flip:
        link.detach()
    return text


def checksum_job(spec: str, exchange: str) -> tuple[bool, int]:
    """Returns whether a run with checksums equals one without, and their cost in bytes."""
    weights, sent = [], []
    for checksum in (False, True):
        model = _model()
        link = gradwire.attach(model, spec, exchange=exchange, checksum=checksum)
        jobs.train(model, 3)
        weights.append(jobs.weights(model))
        sent.append(int(str(link.stats()["sent_bytes"])))
        link.detach()
    return torch.equal(*weights), sent[1] - sent[0]


def flipped_on_the_wire_job() -> str:
    """Lets rank 1 receive a message of rank 2 with one bit flipped."""
    # One bucket: at a second one the others would wait for rank 1 until the group's timeout.
    model = DDP(jobs.mlp())
    link = gradwire.attach(model, "topk:ratio=0.1", exchange="gather", checksum=True)
    jobs.train(model, 2)
    begin = link._comm._begin

    def flipping(collective: Any) -> Begun:
        works, results = begin(collective)

        def flipped() -> list[Tensor]:
            received = results()
            if dist.get_rank() == 1:
                received[2][received[2].numel() // 2] ^= 16
            return received

        return works, flipped

    link._comm._begin = flipping  # type: ignore[method-assign]
    return jobs.failure_of(lambda: jobs.train(model, 1, first=2))


def _residuals(link: gradwire.Link) -> Tensor:
    [state] = link.state_dict().values()
    lanes: Any = state["lanes"]  # type: ignore[index]
    return torch.cat([lane["memory"]["residual"] for lane in lanes.values() if lane["memory"]])


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and all(_same(v, other[k]) for k, v in one.items())
    return one == other
