"""Compressed gradients inside a torchft Manager: `gradwire.elastic.attach`."""

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.elastic.exchange import TwoPhaseExchange
from gradwire.elastic.legality import check_means, check_one_level
from gradwire.elastic.manager import KEY, Manager, check_manager
from gradwire.engine.engine import Engine
from gradwire.engine.last_step import LastStep
from gradwire.engine.make_plan import make_plan
from gradwire.engine.ownership import check_free, claim, release
from gradwire.engine.plan import Plan
from gradwire.errors import ConfigError
from gradwire.integrations.parameters import names_of
from gradwire.integrations.reducer import Model, messages
from gradwire.integrations.settings import Options, Settings, settings_of
from gradwire.policies import MethodSpec
from gradwire.version import VERSION

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("gradwire")


def attach(
    manager: object,
    model: Model,
    compressor: MethodSpec | Settings,
    **options: "Unpack[Options]",
) -> "ElasticReducer":
    """Averages a model's gradients over the replicas of a torchft Manager, compressed.

    It takes the place of torchft's DistributedDataParallel: the gradients are exchanged when the
    Manager is asked whether to commit the step, once a step, or before that by `reduce`, which is
    for clipping. Model and optimiser are registered with the Manager as torchft asks for, which
    hands their state to a replica that joins. Options are those of `gradwire.Settings`: memory,
    exchange, seed, nan_policy and checksum (docs/how-to/elastic.md).
    """
    return ElasticReducer(manager, model, settings_of(compressor, options))


class ElasticReducer:
    """Averages gradients over the replicas that are present, until `detach`.

    What a step leaves unsent becomes the residual if the Manager commits the step; otherwise the
    residual stays what it was.
    """

    def __init__(self, manager: object, model: Model, settings: Settings) -> None:
        check_manager("elastic", manager)
        self._manager = cast(Manager, manager)
        settings.refuse_auto("elastic")
        settings.refuse(
            "elastic", "controller", "check_every", "cuda_graphs", "least_bytes", "chunk_bytes"
        )
        check_one_level("elastic", settings.exchange)
        if isinstance(model, DDP):
            raise ConfigError(
                "elastic: pass the module itself; attach takes the place of "
                "DistributedDataParallel, torchft's as well as torch's"
            )
        names = names_of(model)
        check_free(names.items())
        self._parameters, self._settings = names, settings
        self._tensors: dict[str, Tensor] = {name: p for p, name in names.items()}
        engine = Engine(
            self._plan(1),
            self._tensors,
            0,
            1,
            settings.seed,
            settings.nan_policy,
            cuda_graphs=False,
            discards_lanes=True,
        )
        self._exchange = TwoPhaseExchange(
            self._manager, engine, self._plan, self._identity, settings.checksum
        )
        self._engine, self._is_reduced = engine, False
        self._last_step = LastStep(self._exchange.meter, "all")
        self._decide = self._manager.should_commit
        self._manager.register_state_dict_fn(KEY, self._load, dict)
        vars(manager)["should_commit"] = self._should_commit
        claim(names, self)
        log.info("attached to a torchft Manager: %s", engine.plan.describe())

    def reduce(self) -> None:
        """Replaces all gradients by their mean over the replicas of this step's quorum.

        A parameter without a gradient counts as zero. A failure is not raised: the Manager will not
        commit the step, and its gradients must not be used. Raises ConfigError if this replica is
        set up differently from those that were there before it.
        """
        self._check_attached()
        if self._is_reduced:
            raise ConfigError("reduce: the gradients of this step were averaged already")
        if self._manager._load_state_dict_fns.keys() == {KEY}:
            raise ConfigError(
                "elastic: the Manager has no state to hand to a replica that joins; give it "
                "load_state_dict and state_dict of the model and the optimiser"
            )
        self._is_reduced = True
        self._manager.wait_quorum()
        # A replica that waits for the state of a peer has computed with parameters of its own.
        silent = not self._manager.is_participating()
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif silent:
                parameter.grad.zero_()
        found = (
            ([self._parameters[p] for p in some], [p.grad for p in some if p.grad is not None])
            for some in messages(self._parameters)
        )
        self._exchange.average(found, silent=silent)

    def stats(self) -> dict[str, object]:
        """Returns bytes, times and errors of this replica, and counts of quorums and steps.

        `commits` and `rollbacks` are steps, `joined_replicas` and `lost_replicas` those that this
        one has seen come and go. `dropped_norm` sums the norms of residuals that ended here because
        this replica received its state from a peer, `received_states` times. `auxiliary_bytes` are
        those of introductions in new quorums, which no other number includes.
        """
        return self._exchange.stats()

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Returns numbers of this replica's last step, to be logged after each of them."""
        exchanges = self._exchange.commits + self._exchange.rollbacks
        return self._last_step.numbers(prefix, exchanges, [self._engine], exchanges)

    def detach(self) -> None:
        """Ends the exchange on this replica, between two steps; its residuals are dropped."""
        self._check_attached()
        norm = self._engine.errors()["residual_norm"]
        if norm:
            log.info("detach: residuals of norm %.3g are dropped", norm)
        del vars(self._manager)["should_commit"]
        del self._manager._load_state_dict_fns[KEY], self._manager._user_state_dicts[KEY]
        release(self._parameters, self)

    def _should_commit(self, timeout: timedelta | None = None) -> bool:
        if not self._is_reduced:
            self.reduce()
        self._is_reduced = False
        # Returns the same on all ranks of a replica; a replica that joins loads its state here.
        committed = self._decide(timeout=timeout)
        self._exchange.finish(committed=committed)
        self._last_step.end(self._engine.dense_bytes)
        return committed

    def _load(self, _: object) -> None:
        self._exchange.state_received()

    def _check_attached(self) -> None:
        if vars(self._manager).get("should_commit") != self._should_commit:
            raise ConfigError("this reducer is detached; attach the model again")

    def _plan(self, size: int) -> Plan:
        settings = self._settings
        plan = make_plan(
            settings.first_method(), settings.memory, settings.exchange, self._tensors, size
        )
        if self._manager._use_async_quorum:
            check_means("elastic", plan, "make the Manager with use_async_quorum=False")
        return plan

    def _identity(self, plan: Plan) -> Mapping[str, object]:
        """Returns what must be equal on all replicas."""
        settings = self._settings
        return {
            "version": VERSION,
            "exchanged": "gradients",
            **plan.identity(),
            "seed": settings.seed,
            "nan_policy": settings.nan_policy,
            "checksum": settings.checksum,
            "code": plan.code_digests(),
            **{f"parameter {n}": f"{tuple(t.shape)} {t.dtype}" for n, t in self._tensors.items()},
        }
