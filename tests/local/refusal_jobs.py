"""Jobs of real ranks that give local methods models which others synchronise or shard."""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from local_jobs import ALL_METHODS
from local_workers import Method, plain_sgd, small_model, take_step, weights
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.errors import ConfigError
from gradwire.local import LocalSGD
from gradwire.local.base import LocalMethod


def build(name: str, model: nn.Module, group: dist.ProcessGroup | None = None) -> LocalMethod:
    method, args, settings = ALL_METHODS[name]
    return method(model, plain_sgd(model), *args, process_group=group, **settings)


def refused_constructions(kind: str) -> dict[str, str]:
    """Returns every method's error for a model of some kind; none may have created a group."""
    model = _MODELS[kind]()
    before = dist.get_pg_count()
    found = {name: error_of(lambda name=name: build(name, model)) for name in ALL_METHODS}
    assert dist.get_pg_count() == before, "a group was created before the refusal"
    return found


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except ConfigError as error:
        return str(error)
    return ""


def _fsdp2() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(small_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _fsdp2_unsharded() -> nn.Module:
    """Returns a model whose parameters are plain tensors for the moment."""
    model = _fsdp2()
    model.unshard()
    return model


def _tensor_parallel() -> nn.Module:
    from torch.distributed.tensor import Shard, distribute_tensor

    model, mesh = small_model(), init_device_mesh("cpu", (dist.get_world_size(),))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
    return model


def _fsdp1(*, original: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    cpu = torch.device("cpu")
    return FullyShardedDataParallel(small_model(), use_orig_params=original, device_id=cpu)


def _compiled_ddp() -> nn.Module:
    compiled: nn.Module = torch.compile(DDP(small_model()))
    return compiled


def _ddp_inside() -> nn.Module:
    return nn.Sequential(DDP(small_model()), nn.Linear(32, 32))


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "fsdp2": _fsdp2,
    "fsdp2 unsharded": _fsdp2_unsharded,
    "tensor parallel": _tensor_parallel,
    "fsdp1": lambda: _fsdp1(original=False),
    "fsdp1 original": lambda: _fsdp1(original=True),
    "ddp": lambda: DDP(small_model()),
    "compiled ddp": _compiled_ddp,
    "ddp inside": _ddp_inside,
}


def forward_through_ddp(name: str) -> list[str]:
    """Returns the errors of training steps through a DDP whose module a method has.

    The DDP is built before the method, and after it; the third is the error of a gradient that is
    accumulated without an exchange at first.
    """
    found = []
    for built_first in (True, False):
        model = small_model()
        ddp = DDP(model) if built_first else None
        with build(name, model):
            ddp = ddp or DDP(model)
            with torch.no_grad():
                ddp(torch.zeros(1, 40))
            found.append(error_of(lambda ddp=ddp: ddp(torch.zeros(1, 40)).sum().backward()))
    model = small_model()
    ddp = DDP(model)
    with build(name, model):
        with ddp.no_sync():
            ddp(torch.zeros(1, 40)).sum().backward()
        found.append(error_of(lambda: ddp(torch.zeros(1, 40)).sum().backward()))
    # The context is over, and its hook with it.
    ddp(torch.zeros(1, 40)).sum().backward()
    return found


def forward_through_compiled_ddp() -> list[str]:
    """Returns the errors of models compiled inside a DDP: over all ranks, and over this one."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    found = []
    for group, fullgraph in ((None, False), (alone, True)):
        model = small_model()
        compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
        ddp = DDP(compiled, process_group=group)  # type: ignore[arg-type]
        with build("local", model):
            found.append(error_of(lambda ddp=ddp: ddp(torch.zeros(1, 40)).sum().backward()))
    return found


@contextmanager
def islands() -> Iterator[tuple[dist.ProcessGroup, dist.ProcessGroup]]:
    """Yields this rank's island of two neighbours, and the group of its place in both islands."""
    rank = dist.get_rank()
    inside = [dist.new_group([i, i + 1]) for i in (0, 2)][rank // 2]
    across = [dist.new_group([i, i + 2]) for i in (0, 1)][rank % 2]
    yield inside, across


def trained_on_islands(gives_ddp: bool, among_all: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the weights before and after each sync, with DDP inside islands of two."""
    before, after = [], []
    with islands() as (inside, across):
        model = small_model()
        ddp = DDP(model, process_group=inside)
        optimizer = plain_sgd(model)
        given = ddp if gives_ddp else model
        with LocalSGD(given, optimizer, sync_every=2, process_group=None if among_all else across):
            for step in range(4):
                take_step(ddp, optimizer, step, dist.get_rank())
                (after if step % 2 else before).append(weights(model))
    return before, after


def trained_without_ddp_exchange(method: Method) -> tuple[Tensor, Tensor]:
    """Returns weights with a DDP that never exchanges, in `no_sync`, and without one."""
    found = []
    for wraps in (True, False):
        model = small_model()
        trained = DDP(model) if wraps else model
        optimizer = plain_sgd(model)
        with method(model, optimizer, sync_every=2):
            for step in range(4):
                if isinstance(trained, DDP):
                    with trained.no_sync():
                        take_step(trained, optimizer, step, dist.get_rank())
                else:
                    take_step(trained, optimizer, step, dist.get_rank())
        found.append(weights(model))
    return found[0], found[1]


def copies_in_a_context() -> list[bool]:
    """Returns whether copied and loaded models are as the original, inside DDP."""
    model = small_model()
    optimizer, inputs, found = plain_sgd(model), torch.ones(2, 40), list[bool]()
    with LocalSGD(model, optimizer, sync_every=2):
        for step in range(2):
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
                outputs = DDP(other, init_sync=False)(inputs)
                outputs.sum().backward()
                found.append(torch.equal(outputs, model(inputs)))
            take_step(model, optimizer, step, dist.get_rank())
    return found


def trained_in_form(form: str) -> tuple[Tensor, Tensor]:
    """Returns the weights of a compiled or scripted model, and of a plain one."""
    found = []
    torch.compiler.reset()
    for is_plain in (False, True):
        model: nn.Module = small_model()
        if form == "compiled" and not is_plain:
            model.compile(fullgraph=True, backend="eager")
        elif not is_plain:
            model = torch.jit.trace(model, torch.zeros(1, 40))
        optimizer = plain_sgd(model)
        # A hook may neither break the graph nor cause another compilation when it is removed.
        strict = torch._dynamo.config.patch(error_on_recompile=True)
        with strict, LocalSGD(model, optimizer, sync_every=2):
            for step in range(4):
                take_step(model, optimizer, step, dist.get_rank())
        found.append(weights(model))
    return found[0], found[1]
