"""Watches the steps of a model in a running job: with its exchange, without it, and compressed.

The watch sits in the forward pass of a DDP or FSDP2 model. It times whole steps, from one forward
pass to the next, so that data loading and the optimiser count; leaves out the exchange of every
second step; then attaches methods for a few steps each. So gradients are not those of a training
run, and when all has been measured `MeasurementDone` ends the script.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from gradwire.auto.optimizers import is_adaptive
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.engine.step import SAMPLE_EVERY
from gradwire.errors import ConfigError
from gradwire.integrations.ddp import attach
from gradwire.integrations.fsdp import attach_fsdp
from gradwire.integrations.handle import Handle
from gradwire.integrations.parameters import group_of
from gradwire.perfmodel.link_table import LinkTable, measure_links
from gradwire.perfmodel.probe import gather_numbers

WARM_UP = 4
PAIRS = 12
"""Steps with and without exchange, in turn."""
ROUNDS = 3
"""How often each method is tried, in turn."""
BLOCK = 5
"""Steps of a method in a row. The first one is not timed, and the last one samples the error."""

DENSE = "none"
METHODS = (DENSE, "fp16", "powersgd:rank=4", "int4", "topk:ratio=0.01")


class MeasurementDone(BaseException):
    """Ends the script that is watched; not an Exception, which scripts may catch."""


class _Model(Protocol):
    """A model whose exchange can be left out for a step."""

    group: dist.ProcessGroup
    device: torch.device

    def exchanges(self) -> bool:
        """Returns whether the user's script exchanges gradients after this forward pass."""
        ...

    def set_exchange(self, wanted: bool) -> None: ...

    def attach(self, spec: str) -> Handle: ...


class _DdpModel:
    def __init__(self, model: DDP) -> None:
        self._model = model
        self.group = model.process_group
        self.device = next(model.parameters()).device

    def exchanges(self) -> bool:
        return bool(self._model.require_backward_grad_sync)

    def set_exchange(self, wanted: bool) -> None:
        self._model.require_backward_grad_sync = wanted

    def attach(self, spec: str) -> Handle:
        return attach(self._model, spec)


class _FsdpModel:
    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        sharded: Any = next(p for p in model.parameters() if hasattr(p, "device_mesh"))
        self.group = group_of(sharded.device_mesh)
        self.device = sharded.to_local().device

    def exchanges(self) -> bool:
        return True

    def set_exchange(self, wanted: bool) -> None:
        self._model.set_requires_gradient_sync(wanted)

    def attach(self, spec: str) -> Handle:
        return attach_fsdp(self._model, spec)


@dataclass(frozen=True)
class Trial:
    """A method as it ran: its times on each rank, or the reason why it did not run."""

    spec: str
    steps_s: tuple[float, ...] = ()
    relative_error: float = 0.0
    sent_bytes: float = 0.0
    refused: str | None = None


@dataclass(frozen=True)
class Watched:
    """All measurements of a job, the same on all ranks. Times are those of the slowest rank."""

    kind: str
    parameters: tuple[torch.Tensor, ...]
    backend: str
    workers: int
    links: LinkTable
    exchange_s: tuple[float, ...]
    alone_s: tuple[float, ...]
    rank_alone_s: tuple[float, ...]
    """Median step without exchange of each rank."""
    trials: tuple[Trial, ...]
    adaptive: bool | None
    """Whether the optimiser rescales every entry; None if none was seen."""


@dataclass
class StepWatch:
    """Measures the first model that takes training steps in this process."""

    limit_s: float
    methods: Sequence[str] = METHODS
    result: Watched | None = None
    steps: int = 0
    """Steps that were watched so far."""
    _model: _Model | None = None
    _kind: str = ""
    _handle: Handle | None = None
    _optimizer: Optimizer | None = None
    _plan: list[str] = field(default_factory=lambda: ["warm-up"] * WARM_UP)
    _mode: str = "warm-up"
    _started_s: float | None = None
    _times: dict[str, list[float]] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)
    _seen: dict[str, tuple[float, float]] = field(default_factory=dict)
    _links: LinkTable | None = None
    _removers: list[Callable[[], None]] = field(default_factory=list)
    _parameters: tuple[torch.Tensor, ...] = ()

    def install(self) -> None:
        """Waits for the first forward pass of a DDP or FSDP2 model, whatever script makes it."""

        def before(module: nn.Module, _: object) -> None:
            if isinstance(module, DDP | FSDPModule) and torch.is_grad_enabled():
                remove.remove()
                self.follow(module)
                self._before_forward()

        def noted(optimizer: Optimizer, *_: object) -> None:
            self._optimizer = optimizer

        remove = register_module_forward_pre_hook(before)
        self._removers += [remove.remove, register_optimizer_step_pre_hook(noted).remove]

    def follow(self, module: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Watches this model from its next forward pass on."""
        self._optimizer = optimizer or self._optimizer
        self._kind = "DDP" if isinstance(module, DDP) else "FSDP2"
        self._model = _DdpModel(module) if isinstance(module, DDP) else _FsdpModel(module)
        self._parameters = tuple(p for p in module.parameters() if p.requires_grad)
        if self._model.group.size() < 2:
            raise ConfigError("doctor: one rank exchanges nothing; start several processes")
        if isinstance(module, DDP) and module._comm_hooks:
            hook = module._comm_hooks[0][0].__qualname__
            self._refused = dict.fromkeys(self.methods, f"the hook slot is taken by {hook}")
        # First among the hooks of a forward pass, so that those of others see the chosen mode.
        before = module.register_forward_pre_hook(lambda *_: self._before_forward(), prepend=True)
        after = module.register_forward_hook(lambda *_: self._after_forward())
        self._removers += [before.remove, after.remove]

    def close(self) -> None:
        for remove in self._removers:
            remove()
        self._removers = []
        if self._handle is not None and self._handle._is_attached():
            self._handle._release()

    def _before_forward(self) -> None:
        model = self._model
        assert model is not None
        if not torch.is_grad_enabled() or not model.exchanges():
            # Evaluation, or a micro-batch that the script does not exchange.
            return
        now_s = self._now()
        if self._started_s is not None:
            self._times.setdefault(self._mode, []).append(now_s - self._started_s)
            self.steps += 1
            self._plan.pop(0)
        elif self._links is None:
            self._links = measure_links(model.group, model.device)
        if not self._plan and not self._extend_plan():
            self._finish()
        if self._plan[0] != self._mode:
            self._change_mode(self._plan[0])
        self._sample_error(self._plan[1:2] != [self._mode])
        self._started_s = self._now()

    def _after_forward(self) -> None:
        if self._mode == "alone" and self._kind == "DDP" and self._model is not None:
            # DDP reads this once, in its forward pass; the script may read it later.
            self._model.set_exchange(True)

    def _now(self) -> float:
        if self._model is not None and self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return perf_counter()

    def _extend_plan(self) -> bool:
        """Plans the steps after the warm-up, as many as fit into the time; False at the end."""
        if "exchange" in self._times:
            return False
        assert self._model is not None
        comm = ProcessGroupComm(self._model.group)
        own_s = sorted(self._times["warm-up"])[len(self._times["warm-up"]) // 2]
        step_s = max(s for [s] in gather_numbers(comm, self._model.device, [own_s]))
        pairs = min(PAIRS, max(3, int(0.4 * self.limit_s / (2 * step_s))))
        one_round = BLOCK * len(self.methods) * step_s
        rounds = min(ROUNDS, max(1, int(0.6 * self.limit_s / one_round)))
        self._plan = ["exchange", "alone"] * pairs
        if len(self._refused) < len(self.methods):
            for _ in range(rounds):
                self._plan += [spec for spec in self.methods for _ in range(BLOCK)]
        return True

    def _change_mode(self, mode: str) -> None:
        model = self._model
        assert model is not None
        self._note_method()
        self._mode = mode
        model.set_exchange(mode != "alone")
        if mode in self.methods and mode not in self._refused:
            try:
                if self._handle is None:
                    self._handle = model.attach(mode)
                else:
                    self._handle.switch(mode)
            except ConfigError as error:
                # Raised on all ranks alike, which have all checked the same.
                self._refused[mode] = str(error)

    def _sample_error(self, wanted: bool) -> None:
        """Makes the next step sample the compression error, which costs passes over memory."""
        if self._handle is not None:
            for lane in self._handle._engine.lanes.values():
                lane.sample_every = 1 if wanted else SAMPLE_EVERY

    def _note_method(self) -> None:
        if self._handle is not None and self._mode not in self._refused:
            numbers, stats = self._handle.metrics(), self._handle.stats()
            error = stats["relative_error"]
            assert isinstance(error, float)
            self._seen[self._mode] = error, numbers.get("sent_bytes", 0.0)

    def _finish(self) -> NoReturn:
        model = self._model
        assert model is not None
        assert self._links is not None
        self._note_method()
        comm = ProcessGroupComm(model.group)
        ranks = {
            mode: gather_numbers(comm, model.device, times) for mode, times in self._times.items()
        }
        slowest = {mode: tuple(map(max, zip(*of, strict=True))) for mode, of in ranks.items()}
        self.result = Watched(
            self._kind,
            self._parameters,
            dist.get_backend(model.group),
            comm.size,
            self._links,
            slowest["exchange"],
            slowest["alone"],
            tuple(sorted(times)[len(times) // 2] for times in ranks["alone"]),
            tuple(self._trial(spec, slowest, comm) for spec in self.methods),
            None if self._optimizer is None else is_adaptive(self._optimizer),
        )
        raise MeasurementDone

    def _trial(
        self, spec: str, slowest: Mapping[str, Sequence[float]], comm: ProcessGroupComm
    ) -> Trial:
        if spec in self._refused:
            return Trial(spec, refused=self._refused[spec])
        steps_s = [s for i, s in enumerate(slowest[spec]) if 0 < i % BLOCK < BLOCK - 1]
        assert self._model is not None
        errors = gather_numbers(comm, self._model.device, self._seen[spec])
        error, sent = (sum(column) / comm.size for column in zip(*errors, strict=True))
        return Trial(spec, tuple(steps_s), error, sent)
