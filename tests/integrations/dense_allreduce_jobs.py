"""Jobs of the dense all-reduce tests. Each runs on every rank."""

import copy
import gc
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import Any
from weakref import ref

import ddp_jobs as jobs
import fsdp_jobs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.engine.engine import Engine
from gradwire.integrations.ddp import Link
from gradwire.integrations.handle import Handle


def _ddp(**options: Any) -> DDP:
    return DDP(jobs.mlp(), bucket_cap_mb=0.01, **options)


def _by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad.mul_(1 / dist.get_world_size()))


def loop_job() -> bool:
    """Returns whether a loop's gradients are the exact mean, whose order is fixed on two ranks."""
    ours, plain = jobs.mlp(), jobs.mlp()
    reducer = gradwire.Reducer(ours, "none")
    for model in (ours, plain):
        jobs.loss_of(model, 0).backward()
    reducer.reduce()
    _by_hand(plain)
    reducer.detach()
    expected = jobs.grads(plain)
    return all(torch.equal(g, expected[n]) for n, g in jobs.grads(ours).items())


def three_of_four_job() -> bool:
    """Returns whether `none` equals plain DDP on three ranks, where x / 3 and x * (1/3) differ."""
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() == 3:
        return True
    models = [_ddp(process_group=group) for _ in range(2)]
    link = gradwire.attach(models[1], "none")
    for model in models:
        jobs.train(model, 4)
    link.detach()
    return torch.equal(*map(jobs.weights, models))


class Images(nn.Module):
    """A model with channels-last gradients, of which one is empty."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).mean((2, 3))) + self.empty.sum()


def strides_job() -> tuple[bool, bool]:
    """Returns whether non-contiguous gradients become what plain DDP makes of them."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(2, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
    found = []
    for attached in (False, True):
        model = DDP(Images())
        link = gradwire.attach(model, "none") if attached else None
        model(x).square().mean().backward()
        found.append(jobs.grads(model.module))
        if link is not None:
            link.detach()
    strided = not found[0]["conv.weight"].is_contiguous()
    return strided, all(torch.equal(g, found[1][n]) for n, g in found[0].items())


COUNTED = ("steps", "calls", "sent_bytes", "received_bytes", "message_bytes", "dense_bytes")


def counts_job(integration: str, by_programs: bool, steps: int) -> tuple[list[Any], bool]:
    """Returns the counters after some steps, and whether time on the wire was counted."""
    with pytest.MonkeyPatch.context() as patch:
        if by_programs:
            patch.setattr(Engine, "is_plain_mean", lambda _: False)
        else:
            patch.setattr(Engine, "bucket_program", None)
        handle = _run(integration, steps)
    stats: Any = handle.stats()
    handle.detach()
    return [stats[key] for key in COUNTED], stats["wire_s"] > 0


def _run(integration: str, steps: int) -> Handle:
    if integration == "ddp":
        model = _ddp()
        link = gradwire.attach(model, "none", checksum=True)
        jobs.train(model, steps)
        return link
    if integration == "ddp with a hook":
        hooked = _ddp()
        # Ranks would compare parameters only at the end of a step, in our hook.
        link = gradwire.attach(hooked, "none", check_every=1000)
        jobs.train(hooked, steps)
        return link
    if integration == "fsdp":
        sharded = fsdp_jobs.sharded()
        shards = gradwire.attach_fsdp(sharded, "none")
        fsdp_jobs.train(sharded, steps)
        return shards
    loop = jobs.mlp()
    reducer = gradwire.Reducer(loop, "none")
    for step in range(steps):
        jobs.loss_of(loop, step).backward()
        reducer.reduce()
    return reducer


def not_finite_job(bad: float) -> tuple[dict[str, Tensor], bool, Any]:
    """Returns gradients after a bad one on rank 1, whether plain DDP has the same, and steps."""
    found = []
    steps = None
    for attached in (False, True):
        model = _ddp()
        link = gradwire.attach(model, "none") if attached else None
        (jobs.loss_of(model, 0) * (bad if dist.get_rank() == 1 else 1.0)).backward()
        found.append(jobs.grads(model.module))
        if link is not None:
            steps = link.stats()["steps"]
            link.detach()
    plain, ours = found
    same = all(torch.equal(g.isfinite(), plain[n].isfinite()) for n, g in ours.items())
    return ours, same, steps


def switched_job() -> tuple[Tensor, list[Any], bool]:
    """Switches from dense to sparse and back; returns weights, counts, and whether detach works."""
    model, twin = _ddp(), _ddp()
    link = gradwire.attach(model, "none")
    seen = []
    for number, spec in enumerate(("none", "topk:ratio=0.1", "none")):
        link.switch(spec)
        jobs.train(model, 2, first=2 * number)
        stats = link.stats()
        seen.append((stats["steps"], stats["spec"], stats["residual_norm"] > 0))
    link.detach()
    twin.module.load_state_dict(model.module.state_dict())
    trained = jobs.weights(model)
    for each in (model, twin):
        jobs.train(each, 1, first=6)
    return trained, seen, torch.equal(jobs.weights(model), jobs.weights(twin))


def drift_job() -> str:
    """Checks that ranks still compare their parameters with check_every."""
    model = _ddp()
    link = gradwire.attach(model, "none", check_every=2)
    jobs.train(model, 2)
    with torch.no_grad():
        model.module[0].weight[0, 0] += dist.get_rank()
    text = jobs.failure_of(lambda: jobs.train(model, 2, first=2))
    link.detach()
    return text


TIMEOUT_S = 1.5


def absent_job(options: dict[str, Any]) -> dict[str, Any]:
    """Returns rank 0's errors, and how long it waited, in passes that rank 1 does not join."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    model = _ddp(process_group=group)
    link = gradwire.attach(model, "none", **options)
    # Twice, since DDP communicates when it rebuilds its buckets.
    jobs.train(model, 2)
    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        start_s = perf_counter()
        found["backward"] = [jobs.failure_of(jobs.loss_of(model, 1).backward) for _ in range(2)]
        found["waited_s"] = perf_counter() - start_s
        found["steps"] = link.stats()["steps"]
        found["saved"] = list(link.state_dict())
        found["switch"] = jobs.failure_of(lambda: link.switch("efsign"))
    dist.barrier()
    return found


def hook_of(model: DDP) -> str | None:
    """Returns the name of the model's communication hook."""
    name: str | None = model._get_ddp_logging_data().get("comm_hook") or None
    return name


def hooks_job() -> dict[str, object]:
    """Returns the hook's name for settings that need one or not, after training."""
    found: dict[str, object] = {}
    settings: dict[str, dict[str, Any]] = {
        "dense": {},
        "checksum": {"checksum": True},
        "raise": {"nan_policy": "raise"},
        "check_every": {"check_every": 2},
        "gather": {"exchange": "gather"},
        "least_bytes": {"least_bytes": 100},
        "controller": {"controller": "autopilot"},
        "group": {"process_group": dist.new_group()},
    }
    for name, options in settings.items():
        model = _ddp()
        try:
            link = gradwire.attach(model, "none", **options)
        except gradwire.ConfigError:
            found[name] = "refused"
            continue
        jobs.train(model, 3)
        found[name] = hook_of(model)
        link.detach()
    for option in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view"):
        model = _ddp(**{option: True})
        link = gradwire.attach(model, "none")
        jobs.train(model, 3)
        found[option] = hook_of(model), link.stats()["steps"]
        link.detach()
    return found


PHASES = ("none", "topk:ratio=0.1", "none", "int4")


def phases_job(metered: bool) -> tuple[Tensor, list[Any], list[object]]:
    """Trains two steps with each method; returns weights, counters, and hooks by phase.

    With `metered` every phase goes through our own exchange, dense ones included.
    """
    model = _ddp()
    with pytest.MonkeyPatch.context() as patch:
        if metered:
            patch.setattr(Link, "_may_be_native", lambda _: False)
        link = gradwire.attach(model, PHASES[0])
    seen, hooks = [], list[object]()
    for number, spec in enumerate(PHASES):
        if number:
            link.switch(spec)
        jobs.train(model, 2, first=2 * number)
        stats: Any = link.stats()
        seen.append([stats[key] for key in COUNTED])
        hooks.append(hook_of(model))
    link.detach()
    return jobs.weights(model), seen, hooks


def restarted_job() -> Tensor:
    """Trains as `phases_job`, but with a new model and link for every phase.

    Random numbers of the last phase depend on the step, which a loaded state brings.
    """
    weights: dict[str, Tensor] | None = None
    state: dict[str, object] = {}
    for number, spec in enumerate(PHASES):
        model = _ddp()
        if weights is not None:
            model.module.load_state_dict(weights)
        link = gradwire.attach(model, PHASES[max(0, number - 1)])
        if state:
            link.load_state_dict(state)
        link.switch(spec)
        jobs.train(model, 2, first=2 * number)
        weights, state = model.module.state_dict(), link.state_dict()
        link.detach()
    return jobs.weights(model)


def accumulation_job(metered: bool) -> list[Any]:
    """Returns steps and calls after passes under no_sync, without a backward, and without grad."""
    model = _ddp()
    with pytest.MonkeyPatch.context() as patch:
        if metered:
            patch.setattr(Link, "_may_be_native", lambda _: False)
        link = gradwire.attach(model, "none")
    jobs.train(model, 2)
    first: Any = link.stats()
    with model.no_sync():
        jobs.loss_of(model, 2).backward()
        late = jobs.loss_of(model, 2)
    late.backward()
    jobs.loss_of(model, 3)
    with torch.no_grad():
        jobs.loss_of(model, 3)
    second: Any = link.stats()
    with model.no_sync():
        jobs.loss_of(model, 2).backward()
    jobs.loss_of(model, 3).backward()
    third: Any = link.stats()
    link.detach()
    return [(s["steps"], s["calls"] - first["calls"]) for s in (first, second, third)]


class Branches(nn.Module):
    """A model of two layers, of which a step uses both, or the first alone."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.second(self.first(x)) if both else self.first(x)


def branches_job(metered: bool) -> tuple[dict[str, int], Tensor]:
    """Leaves parameters out of some steps, then sends random entries; returns steps and weights.

    In the third step rank 0 alone uses the second layer, so that its gradient counts.
    """
    model = DDP(Branches(), find_unused_parameters=True)
    link = _attach_dense(model, metered)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step, both in enumerate([True, False, dist.get_rank() == 0, False, True, False, True]):
        if step == 5:
            steps = _lane_steps(link)
            link.switch("randomk:ratio=0.1")
        optimizer.zero_grad()
        model(torch.randn(4, 40, generator=generator), both).square().mean().backward()
        optimizer.step()
    link.detach()
    return steps, jobs.weights(model)


def _attach_dense(model: DDP, metered: bool) -> Link:
    """Attaches `none`; with `metered` gradients go through our own exchange."""
    with pytest.MonkeyPatch.context() as patch:
        if metered:
            patch.setattr(Link, "_may_be_native", lambda _: False)
        return gradwire.attach(model, "none")


def _lane_steps(link: Link) -> dict[str, int]:
    lanes: Any = link.state_dict()[f"rank{dist.get_rank()}"]
    return {name: lane["step"] for name, lane in lanes["lanes"].items()}


def _train_unevenly(model: DDP, **options: Any) -> None:
    """Trains under DDP's join; rank 0 has more batches than the others."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(**options):
        for step in range(5 if dist.get_rank() == 0 else 3):
            optimizer.zero_grad()
            jobs.loss_of(model, step).backward()
            optimizer.step()


def joined_job(saves: bool) -> tuple[list[int], Tensor]:
    """Returns steps after an uneven join and later, and the weights that random entries give.

    With `saves` a new link continues from the states that were saved after the join.
    """
    model = _ddp()
    link = gradwire.attach(model, "none")
    _train_unevenly(model)
    seen: list[Any] = [link.stats()["steps"]]
    if saves:
        state = link.state_dict()
        link.detach()
        link = gradwire.attach(model, "none")
        link.load_state_dict(state)
        seen.append(link.stats()["steps"])
    link.switch("randomk:ratio=0.1")
    seen.append(link.stats()["steps"])
    jobs.train(model, 2)
    link.detach()
    return seen, jobs.weights(model)


def divided_job(initial: bool) -> tuple[bool, bool]:
    """Returns whether `none` equals plain DDP after an uneven join, natively and by our hook."""
    found = []
    for attached, options in ((False, {}), (True, {}), (True, {"check_every": 1000})):
        model = _ddp()
        link = gradwire.attach(model, "none", **options) if attached else None
        _train_unevenly(model, divide_by_initial_world_size=initial)
        found.append(jobs.weights(model))
        if link is not None:
            link.detach()
    plain, native, hooked = found
    return torch.equal(native, plain), torch.equal(hooked, plain)


def refused_job(loads: bool) -> dict[str, Any]:
    """Registers a hook on the last rank alone, after which no rank may switch, or load a state."""
    model = _ddp()
    link = gradwire.attach(model, "none")
    jobs.train(model, 2)
    state = link.state_dict()
    jobs.train(model, 1)
    if dist.get_rank() == dist.get_world_size() - 1:
        model.register_comm_hook(None, jobs._some_hook)
    change = partial(link.load_state_dict, state) if loads else partial(link.switch, "efsign")
    text = jobs.failure_of(change)
    stats = link.stats()
    link.detach()
    hooks = hook_of(model)
    return {"text": text, "steps": stats["steps"], "spec": stats["spec"], "hook": hooks}


def taken_job() -> dict[str, str]:
    """Returns the errors if someone registers a hook after a dense attach."""
    found: dict[str, str] = {}
    model = _ddp()
    link = gradwire.attach(model, "none")
    jobs.train(model, 1)
    model.register_comm_hook(None, jobs._some_hook)
    found["forward"] = jobs.failure_of(lambda: jobs.loss_of(model, 1))
    found["switch"] = jobs.failure_of(lambda: link.switch("efsign"))
    found["spec"] = str(link.stats()["spec"])
    link.detach()
    found["attach"] = jobs.failure_of(lambda: gradwire.attach(model, "none"))
    return found


def copies_job() -> bool:
    """Returns whether a copy of a dense model trains as plain DDP does, and counts nowhere."""
    model = _ddp()
    link = gradwire.attach(model, "none")
    jobs.train(model, 2)
    twin = copy.deepcopy(model)
    jobs.train(twin, 1, first=2)
    steps = link.stats()["steps"]
    jobs.train(model, 1, first=2)
    link.detach()
    return steps == 2 and torch.equal(jobs.weights(model), jobs.weights(twin))


def freed_job() -> bool:
    """Returns whether a dense model that is dropped attached is freed, with its parameters."""
    model = _ddp()
    link = gradwire.attach(model, "none")
    jobs.train(model, 3)
    parameter = ref(model.module[0].weight)
    del model, link
    gc.collect()
    gradwire.attach(_ddp(), "none").detach()
    gc.collect()
    return parameter() is None
