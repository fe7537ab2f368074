"""Runs code blocks that show an integration, with the names that their readers have already."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gradwire
from processes import as_torchrun


class Net(nn.Module):
    """A model with the names that patterns of the pages look for."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.embed, self.norm, self.head = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.embed(x).relu()))
        return logits


class TrainerNet(nn.Module):
    """The same with the arguments and the result that Hugging Face's Trainer expects."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.net = Net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return TensorDataset(torch.randn(16, 64, generator=generator), torch.arange(16) % 4)


def loss_of(model: nn.Module) -> Tensor:
    x, y = data()[:]
    return nn.functional.cross_entropy(model(x), y)


def new_net() -> Net:
    torch.manual_seed(0)
    return Net()


def on_ddp(code: str) -> dict[str, object]:
    """Runs a block that attaches to `ddp_model`, and a step; returns the statistics."""
    ddp_model = DistributedDataParallel(new_net())
    names: dict[str, Any] = {"ddp_model": ddp_model, "gradwire": gradwire}
    exec(code, names)
    loss_of(ddp_model).backward()
    link = names["link"] if "link" in names else names["state"].link
    stats: dict[str, object] = link.stats()
    link.detach()
    return stats


def in_a_loop(code: str) -> dict[str, object]:
    """Runs a block that has a backward pass and a step; returns the statistics."""
    model = new_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names: dict[str, Any] = {"gradwire": gradwire, "model": model, "optimizer": optimizer}
    exec(code, names := names | {"loss": loss_of(model)})
    stats: dict[str, object] = names["reducer"].stats()
    names["reducer"].detach()
    return stats


def on_shards(code: str, replicated: bool) -> dict[str, object]:
    """Runs a block that shards `model` over `mesh` and attaches; returns the statistics."""
    shape, axes = ((2, 2), ("replicate", "shard")) if replicated else ((4,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    model = new_net()
    names: dict[str, Any] = {"gradwire": gradwire, "fully_shard": fully_shard}
    exec(code, names := names | {"model": model, "mesh": mesh})
    loss_of(model).backward()
    stats: dict[str, object] = names["shards"].stats()
    names["shards"].detach()
    return stats


def under_accelerate(code: str, folder: str) -> tuple[dict[str, object], int]:
    """Runs the block, a step and a save; returns the statistics and the number of saved files."""
    from accelerate import Accelerator

    as_torchrun()
    model = new_net()
    accelerator = Accelerator(cpu=True)
    names: dict[str, Any] = {"gradwire": gradwire, "accelerator": accelerator, "model": model}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(code, names := names | {"loader": DataLoader(data(), batch_size=8)})
    accelerator.backward(loss_of(names["model"]))
    accelerator.save_state(folder)
    dist.barrier()
    stats: dict[str, object] = names["link"].stats()
    names["link"].detach()
    return stats, sum(path.is_file() for path in (Path(folder) / "gradwire").rglob("*"))


def under_transformers(code: str, folder: str) -> dict[str, object]:
    """Runs the block, which trains; returns the statistics."""
    from transformers import Trainer, TrainingArguments

    as_torchrun()
    torch.manual_seed(0)
    args = TrainingArguments(
        folder,
        max_steps=2,
        use_cpu=True,
        ddp_backend="gloo",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    examples = [{"x": x, "labels": y} for x, y in data()]
    names: dict[str, Any] = {"Trainer": Trainer, "args": args, "data": examples}
    exec(code, names := names | {"model": TrainerNet()})
    [own] = [c for c in names["trainer"].callback_handler.callbacks if hasattr(c, "link")]
    stats: dict[str, object] = own.link.stats()
    return stats


def under_lightning(code: str) -> list[str]:
    """Runs the block, which makes two trainers; returns what in them compresses."""
    from lightning.pytorch import Trainer

    as_torchrun()
    made: list[Trainer] = []

    def make(**given: object) -> None:
        quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
        made.append(Trainer(accelerator="cpu", enable_progress_bar=False, **quiet, **given))

    exec(code, {"Trainer": make})
    parts = [[trainer.strategy, *trainer.callbacks] for trainer in made]  # type: ignore[attr-defined]
    names = [[type(part).__name__ for part in each] for each in parts]
    return [name for each in names for name in each if name.startswith("Gradwire")]


def from_grace(code: str, params: dict[str, object]) -> None:
    """Runs what replaces GRACE's loop, on gradients of a backward pass."""
    model = new_net()
    loss_of(model).backward()
    exec(code, {"gradwire": gradwire, "model": model, "params": params})
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total = torch.cat([g.flatten() for g in gradients])
    every = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(every, total)
    assert all(torch.equal(other, total) for other in every)


def statements(code: str) -> int:
    """Runs a block statement by statement; each has new models. Returns how many ran."""
    names: dict[str, Any] = {"gradwire": gradwire, "x": torch.randn(64, 32)}
    ran = 0
    for node in ast.parse(code).body:
        text = ast.unparse(node)
        if "gradwire.keras" in text:  # needs TensorFlow; tests/tf has the integration
            continue
        if any(f"gradwire.{call}(" in text for call in ("attach", "attach_fsdp", "advise")):
            _detach(names.pop("link", None))
        _prepare(text, names)
        returned = _run(node, names)
        if text == "link.detach()":
            names.pop("link")
        if hasattr(returned, "detach") and not isinstance(returned, Tensor):
            _detach(returned)
        ran += 1
    _detach(names.get("link"))
    return ran


def _prepare(text: str, names: dict[str, Any]) -> None:
    """Gives a statement the objects that it has in a reader's script."""
    plain, sharded = new_net(), new_net()
    loss_of(plain).backward()
    is_local = "gradwire.local" in text or "reduce_gradients" in text or "simulate" in text
    if "attach(" in text or "advise(" in text:
        names["ddp_model"] = DistributedDataParallel(new_net())
    names["model"] = plain if is_local else names.get("ddp_model", plain)
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    names["scaler"] = torch.amp.GradScaler("cpu", enabled=False)
    names["loss"] = loss_of
    if "attach_fsdp" in text:
        fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        names["sharded_model"] = sharded
    if "gradients" not in names:
        named = new_net().named_parameters()
        names["gradients"] = [{n: torch.ones_like(p) for n, p in named}] * 64


def _run(node: ast.stmt, names: dict[str, Any]) -> object:
    """Runs a statement; returns the value if it is an expression."""
    if isinstance(node, ast.Expr):
        return eval(compile(ast.Expression(node.value), "page", "eval"), names)
    exec(compile(ast.Module([node], []), "page", "exec"), names)
    return None


def _detach(link: object) -> None:
    detach: Callable[[], None] | None = getattr(link, "detach", None)
    if detach is not None:
        detach()
