"""Jobs of the tests of FSDP2's compressed all-gather. Each runs on every rank."""

from collections import defaultdict
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_jobs import failure_of
from fsdp_jobs import both
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.integrations import fsdp_private
from gradwire.integrations.fsdp_private import GatheredUnit, gathered_units_of
from gradwire.integrations.trainers import attach_request

VOCABULARY, LENGTH, WIDTH = 61, 16, 36
BLOCK = 256


class Block(nn.Module):
    """A block of a small GPT, of sizes that two ranks cannot share evenly."""

    def __init__(self, checkpoints: bool) -> None:
        nn.Module.__init__(self)
        self.checkpoints = checkpoints
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.hidden = nn.Linear(WIDTH, 75)
        self.out = nn.Linear(75, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints:
            result: Tensor = checkpoint(self.compute, x, use_reentrant=False)
            return result
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = x + self.out(nn.functional.gelu(self.hidden(x)))
        return y


class SmallGPT(nn.Module):
    """Two blocks, whose position embedding is frozen; one parameter may be left unused."""

    def __init__(self, checkpoints: bool = False, with_unused: bool = False) -> None:
        nn.Module.__init__(self)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH + 1, WIDTH)
        self.positions.requires_grad_(False)
        self.blocks = nn.ModuleList([Block(checkpoints), Block(checkpoints)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.unused = nn.Parameter(torch.ones(5)) if with_unused else None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def sharded(
    checkpoints: bool = False, with_unused: bool = False, mesh: Any = None, **options: Any
) -> Any:
    """Returns a model of three units; the embedding's rows and others are uneven."""
    torch.manual_seed(0)
    model: Any = SmallGPT(checkpoints, with_unused)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if with_unused:
        model.set_reduce_scatter_unused_params(True)
    return model


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Predicts the next token of a sequence, most of which follow from the one before."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    first = torch.randint(VOCABULARY, (8, 1), generator=generator)
    ids = (first + 7 * torch.arange(LENGTH + 1)) % VOCABULARY
    noise = torch.randint(VOCABULARY, ids.shape, generator=generator)
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, noise, ids)
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01)


def train(model: Any, optimizer: Any, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def whole(model: nn.Module) -> Tensor:
    parameters: list[Any] = [*model.parameters()]
    return torch.cat([p.full_tensor().detach().float().reshape(-1) for p in parameters])


def identity_job(with_unused: bool, steps: int) -> tuple[list[float], list[float], dict[str, Any]]:
    """Returns the losses of plain FSDP2, those with `none` on both legs, and statistics."""
    plain, model = sharded(with_unused=with_unused), sharded(with_unused=with_unused)
    shards = gradwire.attach_fsdp(model, gradients="none", weights="none")
    expected = train(plain, optimizer_of(plain), steps)
    found = train(model, optimizer_of(model), steps)
    return expected, found, shards.stats()


class Recorder:
    """An all-gather that notes a digest of all weights that it returns."""

    def __init__(self, unit: GatheredUnit, digests: dict[str, list[int]]) -> None:
        self.inner, self.title, self.digests = unit.all_gather(), unit.title, digests
        unit.set_all_gather(self)

    def allocate(self, size: Any, **how: Any) -> Tensor:
        return self.inner.allocate(size, **how)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        work = self.inner(output_tensor, input_tensor, group, async_op)
        if work is not None:
            work.wait()
        words = output_tensor.view(torch.int16 if output_tensor.itemsize == 2 else torch.int32)
        order = torch.arange(1, words.numel() + 1)
        self.digests[self.title].append(int((words * order).sum()))
        return work


def digests_job(
    weights: str, model_options: dict[str, Any], settings: dict[str, Any]
) -> tuple[list[dict[str, list[int]]], dict[str, Any], list[float]]:
    """Returns digests of the weights of all units by step, statistics, and losses.

    In each step the gradients of two micro-batches are added up.
    """
    options = dict(model_options)
    if options.pop("bf16", False):
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = sharded(**options)
    shards = gradwire.attach_fsdp(model, "int4", weights=weights)
    digests: dict[str, list[int]] = defaultdict(list)
    for unit in gathered_units_of(model):
        Recorder(unit, digests)
    if settings.get("async"):
        model._set_unshard_async_op(True)
    optimizer, steps, losses = optimizer_of(model), [], []
    for step in range(3):
        optimizer.zero_grad()
        for half in range(2):
            model.set_requires_gradient_sync(half == 1)
            loss = loss_of(model, 2 * step + half) / 2
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        steps.append(dict(digests))
        digests.clear()
    return steps, shards.stats(), losses


def expected_bytes_job(dtype: torch.dtype) -> tuple[int, int]:
    """Returns the bytes of one all-gather of every unit, by hand: as int8, and as they are.

    Small and one-dimensional parameters are sent in their own type; parts fill whole words.
    """
    sent = dense = 0
    for unit in gathered_units_of(sharded()):
        for shape in unit.shapes:
            numel = shape.numel()
            dense += numel * dtype.itemsize
            if len(shape) == 2 and numel >= 1024:
                sent += -(-numel // 4) * 4 + 4 * -(-numel // BLOCK)
            else:
                sent += -(-numel * dtype.itemsize // 4) * 4
    others = dist.get_world_size() - 1
    return others * sent, others * dense


def losses_job(weights: str | None, steps: int) -> tuple[float, Tensor]:
    """Returns the mean loss of the last ten steps, and the master weights."""
    model = sharded()
    if weights is not None:
        gradwire.attach_fsdp(model, gradients="none", weights=weights)
    losses = train(model, optimizer_of(model), steps)
    return sum(losses[-10:]) / 10, whole(model)


def resume_job(folder: str) -> tuple[bool, bool, bool]:
    """Returns whether weights resume bitwise from a distributed checkpoint, and with which step."""
    spec = {"gradients": "topk:ratio=0.1", "weights": "qsgd:bits=8"}
    model = sharded()
    shards, optimizer = gradwire.attach_fsdp(model, **spec), optimizer_of(model)  # type: ignore[arg-type]
    train(model, optimizer, 3)
    dcp.save({"model": model.state_dict(), "shards": shards.state_dict()}, checkpoint_id=folder)
    moments = deepcopy(optimizer.state_dict())
    fresh = sharded()
    again, other = gradwire.attach_fsdp(fresh, **spec), optimizer_of(fresh)  # type: ignore[arg-type]
    state = {"model": fresh.state_dict(), "shards": again.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    fresh.load_state_dict(state["model"])
    again.load_state_dict(state["shards"])
    other.load_state_dict(moments)
    key = f"rank{dist.get_rank()}"
    same_step = state["shards"][key]["weight_step"] == 3
    first = train(model, optimizer, 3, first=3)
    same = first == train(fresh, other, 3, first=3)
    return same, torch.equal(whole(model), whole(fresh)), same_step


def detached_job() -> tuple[bool, bool, dict[str, Any]]:
    """Returns whether `detach` restores the hooks, and training as without us."""
    plain, model = sharded(), sharded()
    before = [unit.all_gather() for unit in gathered_units_of(model)]
    shards = gradwire.attach_fsdp(model, "int4", weights="int8")
    shards.detach()
    after = [unit.all_gather() for unit in gathered_units_of(model)]
    restored = all(a is b for a, b in zip(after, before, strict=True))
    losses = train(model, optimizer_of(model), 2)
    return restored, losses == train(plain, optimizer_of(plain), 2), shards.stats()


def refusals_job() -> dict[str, str]:
    found = {}
    model = sharded()

    def weights(spec: Any, model: Any = model, gradients: Any = "int4") -> str:
        return failure_of(lambda: gradwire.attach_fsdp(model, gradients, weights=spec))

    for spec in ("topk:ratio=0.1", "signsgd", "efsign", "powersgd:rank=2", "qsgd:bits=3", "fp16"):
        found[spec] = weights(spec)
    found["natural"] = weights("natural")
    found["int2"] = weights("int2")
    found["policy"] = weights("*norm*: topk:ratio=0.5; default: int8")
    found["policy memory"] = weights("head*: int8 @ memory=none; default: none")
    found["type"] = weights(8)
    found["both"] = failure_of(lambda: gradwire.attach_fsdp(model, "int4", gradients="int4"))
    found["none"] = failure_of(lambda: gradwire.attach_fsdp(model, weights="int8"))
    found["differ"] = weights(["int8", "eightbit"][dist.get_rank() % 2])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    found["no replicas"] = failure_of(lambda: gradwire.attach_fsdp(model, "int4", replicas=mesh))
    taken = sharded()
    Recorder(gathered_units_of(taken)[0], defaultdict(list))
    found["taken"] = weights("int8", taken)
    old = FullyShardedDataParallel(nn.Linear(64, 64), device_id=torch.device("cpu"))
    found["fsdp1"] = weights("int8", old)
    request = attach_request("Callback", "int4", {"weights": "int8"})
    found["fsdp1 trainer"] = failure_of(lambda: request.attach_any(old, None))
    scaler = torch.amp.GradScaler("cpu")
    found["scaler"] = failure_of(lambda: request.attach_any(sharded(), scaler))
    mixed: Any = SmallGPT()
    mixed.positions.to(torch.bfloat16)
    fully_shard(mixed, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    found["mixed"] = weights("int8", mixed)
    later = sharded()
    gradwire.attach_fsdp(later, "none", weights="int8")
    for group in fsdp_private._groups(later):
        # Read at the first forward pass.
        group.mp_policy = MixedPrecisionPolicy(torch.bfloat16)
    found["later"] = failure_of(lambda: loss_of(later, 0))
    with_weights, without = sharded(), sharded()
    saved = gradwire.attach_fsdp(with_weights, "int4", weights="int8")
    plain = gradwire.attach_fsdp(without, "int4")
    found["load none"] = failure_of(lambda: saved.load_state_dict(plain.state_dict()))
    found["load some"] = failure_of(lambda: plain.load_state_dict(saved.state_dict()))
    other = gradwire.attach_fsdp(sharded(), "int4", weights="int8:block=128")
    found["load other"] = failure_of(lambda: other.load_state_dict(saved.state_dict()))
    return found


def old_torch_job() -> str:
    """Attaches under a torch that is said to be older than the hook."""
    real = fsdp_private.SINCE["set_custom_all_gather"]
    fsdp_private.SINCE["set_custom_all_gather"] = "99.0"
    try:
        return failure_of(lambda: gradwire.attach_fsdp(sharded(), "int4", weights="int8"))
    finally:
        fsdp_private.SINCE["set_custom_all_gather"] = real


def other_group_job() -> str:
    """Attaches a trainer's model that is sharded over half of the ranks."""
    model = sharded(mesh=both()["shard"])
    request = attach_request("Callback", "int4", {"weights": "int8"})
    return failure_of(lambda: request.attach_any(model, None))


def replicas_job() -> tuple[dict[str, Any], Tensor, list[float], list[float]]:
    """Compresses weights among shards, and gradients between replicas."""
    mesh = both()
    model, plain = sharded(mesh=mesh["shard"]), sharded()
    shards = gradwire.attach_fsdp(
        model, gradients="none", weights="int8", replicas=mesh["replicate"]
    )
    optimizer = optimizer_of(model)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        for half in range(2):
            model.set_requires_all_reduce(half == 1)
            loss = loss_of(model, 2 * step + half) / 2
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    other, expected = optimizer_of(plain), []
    for step in range(3):
        other.zero_grad()
        for half in range(2):
            loss = loss_of(plain, 2 * step + half) / 2
            loss.backward()
        other.step()
        expected.append(float(loss.detach()))
    return shards.stats(), whole(model), losses, expected


def native_replicas_job() -> tuple[Tensor, list[int], dict[str, Any]]:
    """Compresses both legs among shards, and lets FSDP2 average over replicas by itself."""
    model = sharded(mesh=both())
    shards = gradwire.attach_fsdp(model, gradients="int4", weights="qsgd:bits=8")
    digests: dict[str, list[int]] = defaultdict(list)
    for unit in gathered_units_of(model):
        Recorder(unit, digests)
    train(model, optimizer_of(model), 2)
    return whole(model), [d for found in digests.values() for d in found], shards.stats()


def secondary_job() -> tuple[bool, int, int, int]:
    """Keeps decoded weights among two of four ranks after forward, as hpZ does inside a node.

    Returns whether backward sees those of forward, how often they were compared, the bytes that
    were sent, and those expected: encoded to all, then halves of what was decoded.
    """
    model = sharded(reshard_after_forward=2)
    shards = gradwire.attach_fsdp(model, "int4", weights="int8")
    forward: dict[str, Tensor] = {}
    equal: list[bool] = []
    layers = [(f"{i}", block.mix) for i, block in enumerate(model.blocks)] + [("", model.head)]
    for name, layer in layers:
        layer.register_forward_hook(lambda m, *_, n=name: forward.update({n: m.weight.clone()}))
        layer.register_full_backward_pre_hook(
            lambda m, _, n=name: equal.append(torch.equal(forward[n], m.weight))
        )
    loss_of(model, 0).backward()
    stats: Any = shards.stats()
    sent, dense = expected_bytes_job(torch.float32)
    ranks = dist.get_world_size()
    whole_bytes = dense // (ranks - 1) * ranks
    return all(equal), len(equal), stats["weight_sent_bytes"], sent + whole_bytes // 2
