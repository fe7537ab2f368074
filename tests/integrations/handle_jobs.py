"""Jobs on the methods of handles that are called at odd times. Each runs on every rank."""

import copy
import io
import threading
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any

import ddp_jobs as jobs
import fsdp_jobs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import gradwire

SPEC = "topk:ratio=0.1"


def calls(handle: Any, state: Any) -> dict[str, Callable[[], object]]:
    """Returns a legal call of every method that all handles have."""
    return {
        "load_state_dict": lambda: handle.load_state_dict(state),
        "load_resized": lambda: handle.load_resized(_states_of_all(state), residuals="drop"),
        "state_dict": handle.state_dict,
        "learning_rate_changed": lambda: handle.learning_rate_changed(0.1, 0.2),
        "loss_scale_changed": lambda: handle.loss_scale_changed(2.0),
        "epoch_ended": lambda: handle.epoch_ended(0.1),
        "switch": lambda: handle.switch("efsign"),
        "stats": handle.stats,
        "metrics": handle.metrics,
        "passes": handle.passes,
        "detach": handle.detach,
    }


def _states_of_all(state: Any) -> list[Any]:
    [own] = state.values()
    size = dist.get_world_size()
    return [{f"rank{rank}": {**own, "rank": rank}} for rank in range(size)]


def _thread(action: Callable[[], str]) -> str:
    found: list[str] = []
    thread = Thread(target=lambda: found.append(action()))
    thread.start()
    thread.join()
    return found[0]


def during_backward_job(method: str, thread: bool) -> tuple[str, Tensor, object]:
    """Calls a method in the middle of the third backward pass; returns its error and the weights.

    Without a method it returns what a run gives that is not disturbed.
    """
    model = DDP(jobs.mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, SPEC)
    state = link.state_dict()
    found: list[str] = []

    def call(_: Tensor) -> None:
        action = calls(link, state)[method]
        text = lambda: jobs.failure_of(action)  # noqa: E731
        found.append(_thread(text) if thread else text())

    jobs.train(model, 2)
    # The first layer is the last in backward, so other buckets are under way.
    hook = model.module[0].bias.register_hook(call) if method else None
    jobs.train(model, 1, first=2)
    if hook is not None:
        hook.remove()
    jobs.train(model, 1, first=3)
    steps = link.stats()["steps"]
    link.detach()
    return "; ".join(found), jobs.weights(model), steps


def reducer_in_backward_job() -> dict[str, str]:
    """Calls every method of a reducer inside backward, where nothing is exchanged."""
    model = jobs.mlp()
    reducer = gradwire.Reducer(model, SPEC)
    state, found = reducer.state_dict(), dict[str, str]()

    def call(_: Tensor) -> None:
        for name, action in calls(reducer, state).items():
            found[name] = jobs.failure_of(action)

    hook = model[0].bias.register_hook(call)
    jobs.loss_of(model, 0).backward()
    hook.remove()
    return found


def shards_in_backward_job(disturbed: bool) -> tuple[dict[str, str], Tensor]:
    """Calls every method of an FSDP2 handle inside backward, from a hook and from a thread."""
    model = fsdp_jobs.sharded()
    shards = gradwire.attach_fsdp(model, SPEC)
    state, found = shards.state_dict(), dict[str, str]()

    def call(_: Tensor) -> None:
        for name, action in calls(shards, state).items():
            found[name] = jobs.failure_of(action)
            assert _thread(lambda action=action: jobs.failure_of(action)) == found[name]  # type: ignore[misc]

    def hook_output(_: nn.Module, __: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(call)

    hook = model[1].register_forward_hook(hook_output) if disturbed else None
    fsdp_jobs.train(model, 2)
    if hook is not None:
        hook.remove()
    fsdp_jobs.train(model, 1, first=2)
    shards.detach()
    return found, fsdp_jobs.weights(model)


def copied_job(how: str, when: str) -> dict[str, bool]:
    """Copies a DDP model between steps; returns what holds for the copy and for the original."""
    model, scaler = DDP(jobs.mlp(), bucket_cap_mb=0.01), torch.amp.GradScaler("cpu", init_scale=4.0)
    link = gradwire.attach(model, SPEC, scaler=scaler)
    jobs.train(model, 2)
    if when == "detached":
        link.detach()
    copied = COPIES[how](model)
    steps = link.stats()["steps"]
    trained = jobs.train(copied, 2, first=2)
    unaffected = link.stats()["steps"] == steps
    own = gradwire.attach(copied, "efsign")
    jobs.train(copied, 1, first=4)
    reattached = own.stats()["steps"] == 1
    own.detach()
    jobs.train(model, 2, first=2)
    if when == "attached":
        link.detach()

    plain = DDP(jobs.mlp(), bucket_cap_mb=0.01)
    other = DDP(jobs.mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(other, SPEC)
    jobs.train(other, 2)
    plain.module.load_state_dict(other.module.state_dict())
    if when == "detached":
        link.detach()
    jobs.train(other, 2, first=2)
    if when == "attached":
        link.detach()
    return {
        "the original goes on": torch.equal(jobs.weights(model), jobs.weights(other)),
        "the copy is plain DDP": trained == jobs.train(plain, 2, first=2),
        "the copy does not use the link": unaffected,
        "the copy can be attached": reattached,
    }


def _saved(model: DDP) -> DDP:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: DDP = torch.load(file, weights_only=False)
    return loaded


def _averaged(model: DDP) -> DDP:
    average = AveragedModel(model)
    average.update_parameters(model)
    assert torch.equal(jobs.weights(average.module), jobs.weights(model))
    copied = average.module
    assert isinstance(copied, DDP)
    return copied


COPIES: dict[str, Callable[[DDP], DDP]] = {
    "deepcopy": copy.deepcopy,
    "torch.save": _saved,
    "AveragedModel": _averaged,
}


def copied_loop_job() -> bool:
    """Copies the model and optimiser of a loop without DDP; returns whether it goes on the same."""
    weights = []
    for copies in (False, True):
        model = jobs.mlp()
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        gradwire.wrap_optimizer(optimizer, SPEC)
        for step in range(4):
            optimizer.zero_grad()
            jobs.loss_of(model, step).backward()
            optimizer.step()
            if copies and step == 1:
                other, others = copy.deepcopy((model, optimizer))
                AveragedModel(model).update_parameters(model)
                # A copy steps without its reducer, so ranks may do so alone.
                if dist.get_rank() == 0:
                    jobs.loss_of(other, step).backward()
                    others.step()
        weights.append(jobs.weights(model))
    return torch.equal(*weights)


class Branches(nn.Module):
    """Three layers, of which each rank uses those that it is told to."""

    def __init__(self, reentrant: bool | None = None) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(40, 40) for _ in range(4)])
        self.used = [True] * 4
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer, used in zip(self.layers, self.used, strict=True):
            if used and self.reentrant is not None:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
            elif used:
                x = layer(x)
        return x


def _use(step: int, rank: int) -> list[bool]:
    """Layer 1 is used by some ranks, layer 2 at every second step, layer 3 at first only."""
    return [True, (step + rank) % 2 == 0, step % 2 == 0, step == 0]


def conservation_job(
    ddp: dict[str, Any], nan_policy: Any, none: bool, nan_at: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what reached the optimiser, this rank's residuals, and its gradients, all summed."""
    rank = dist.get_rank()
    model = DDP(Branches(), find_unused_parameters=True, bucket_cap_mb=0.005, **ddp)
    link = gradwire.attach(model, SPEC, nan_policy=nan_policy)
    local = Branches()
    got = {n: torch.zeros_like(p) for n, p in local.named_parameters()}
    given = {n: torch.zeros_like(p) for n, p in local.named_parameters()}
    for step in range(7):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + rank))
        x = x * float("nan") if step == nan_at and rank == 1 else x
        model.module.used = local.used = _use(step, rank)
        model.zero_grad(set_to_none=none)
        local.zero_grad()
        model(x).square().mean().backward()
        if step == nan_at:
            continue
        local(x).square().mean().backward()
        for name, gradient in jobs.grads(model.module).items():
            got[name] += gradient
        for name, gradient in jobs.grads(local).items():
            given[name] += gradient
    assert link.stats()["steps"] == 7 - (nan_at >= 0)
    [state] = link.state_dict().values()
    lanes: Any = state["lanes"]  # type: ignore[index]
    # Biases are sent as they are.
    left = [lanes[n]["memory"].get("residual", torch.zeros(g.numel())) for n, g in got.items()]
    link.detach()
    flat = [torch.cat([t.view(-1) for t in sums.values()]) for sums in (got, given)]
    return flat[0], torch.cat(left), flat[1]


def unused_in_join_job() -> tuple[Tensor, set[int]]:
    """Gives rank 0 more batches, in which layers are unused; returns weights and lanes' steps."""
    model = DDP(Branches(), find_unused_parameters=True, bucket_cap_mb=0.005)
    link = gradwire.attach(model, "qsgd:bits=4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(7 if dist.get_rank() == 0 else 3):
            model.module.used = _use(step, 0)
            optimizer.zero_grad()
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
    [state] = link.state_dict().values()
    steps = [lane["step"] for lane in state["lanes"].values()]  # type: ignore[index]
    link.detach()
    return jobs.weights(model), steps


def different_times_job(catches: bool) -> str:
    """Calls `switch` inside backward on rank 0 and after it on rank 1; returns the error."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = DDP(jobs.mlp(), process_group=group, bucket_cap_mb=0.01)
    link = gradwire.attach(model, SPEC)
    if dist.get_rank() == 1:
        return jobs.failure_of(lambda: (jobs.train(model, 1), link.switch("efsign")))
    found: list[str] = []

    def call(_: Tensor) -> None:
        found.append(jobs.failure_of(lambda: link.switch("efsign")))
        if not catches:
            raise ValueError(found[0])

    model.module[0].bias.register_hook(call)
    jobs.failure_of(lambda: jobs.train(model, 1))
    return found[0]


def reentrant_job(layer: int) -> tuple[bool, tuple[object, object], Tensor]:
    """Lets one layer's gradient overflow on rank 1, under reentrant checkpointing.

    Returns whether the state stayed the same, steps and skipped steps, and the final weights.
    """
    model = DDP(Branches(reentrant=True), bucket_cap_mb=0.005)
    link = gradwire.attach(model, SPEC)
    _train_blocks(model, [0, 1])
    before = link.state_dict()

    def corrupt(gradient: Tensor) -> Tensor:
        return gradient * float("nan") if dist.get_rank() == 1 else gradient

    hook = model.module.layers[layer].weight.register_hook(corrupt)
    _backward_blocks(model, 2)
    hook.remove()
    same = equal_states(before, link.state_dict())
    stats = link.stats()
    _train_blocks(model, [3, 4])
    link.detach()
    return same, (stats["steps"], stats["skipped"]), jobs.weights(model)


def checkpointed_job(reentrant: bool) -> Tensor:
    """Returns the weights of the run of `reentrant_job` without the overflow."""
    model = DDP(Branches(reentrant=reentrant), bucket_cap_mb=0.005)
    link = gradwire.attach(model, SPEC)
    _train_blocks(model, [0, 1, 3, 4])
    assert link.stats()["steps"] == 4
    link.detach()
    return jobs.weights(model)


def _train_blocks(model: DDP, steps: list[int]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        _backward_blocks(model, step)
        optimizer.step()


def _backward_blocks(model: DDP, step: int) -> None:
    model.zero_grad()
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(8, 40, generator=generator, requires_grad=True)
    model(x).square().mean().backward()


def equal_states(one: object, other: object) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and all(equal_states(v, other[k]) for k, v in one.items())
    return one == other


def interrupted_job() -> tuple[str, bool, str]:
    """Raises in the middle of a backward pass; returns the error, whether the state stayed the

    same, and what detaching raises.
    """
    model = DDP(jobs.mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, SPEC)
    jobs.train(model, 2)
    before = link.state_dict()

    def fail(_: Tensor) -> None:
        raise ValueError("a hook of the user")

    model.module[0].bias.register_hook(fail)
    text = jobs.failure_of(lambda: jobs.train(model, 1, first=2))
    same = equal_states(before, link.state_dict())
    return text, same, jobs.failure_of(link.detach)


def late_error_job() -> list[str]:
    """Lets both models of a backward pass overflow; returns the error of each of three passes."""
    models = [DDP(jobs.mlp(), bucket_cap_mb=0.01) for _ in range(2)]
    links = [gradwire.attach(model, SPEC, nan_policy="raise") for model in models]
    found = []
    for step in range(4):
        for model in models:
            model.zero_grad()
        factor = float("nan") if step == 1 and dist.get_rank() == 0 else 1.0
        losses = [jobs.loss_of(model, step) * factor for model in models]
        found.append(jobs.failure_of(sum(losses, torch.zeros(())).backward))
    assert [link.stats()["steps"] for link in links] == [3, 3]
    assert [link.stats()["skipped"] for link in links] == [1, 1]
    for link in links:
        link.detach()
    return found


def failed_attach_job() -> tuple[dict[str, bool], int]:
    """Lets attach fail in some ways; returns whether the next one has its group, and threads."""
    model, threads = DDP(jobs.mlp()), threading.active_count()
    found: dict[str, bool] = {}
    for error, place in (
        (ValueError("x"), "integrations.ddp.ThreadRunner"),
        (gradwire.WireError("x"), "integrations.handle.check_equal_settings"),
        (gradwire.PeerError("x"), "integrations.handle.check_equal_settings"),
    ):
        before = _group_of_next_link(model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"gradwire.{place}", _raising(error))
            text = jobs.failure_of(lambda: gradwire.attach(model, SPEC))
        found[text] = _group_of_next_link(model) is before
    return found, threading.active_count() - threads


def _group_of_next_link(model: DDP) -> dist.ProcessGroup:
    link = gradwire.attach(model, SPEC)
    link.detach()
    return link._lease.group


def _raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail
