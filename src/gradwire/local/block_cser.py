"""CSER without error buffers: averages parameters on random blocks shared by all workers.

The second implementation of Xie et al. 2020, arXiv:2007.13221.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from gradwire.base import Compressor
from gradwire.comm.base import CollectiveProgram
from gradwire.compressors._sparsifier import Sparsifier
from gradwire.engine.engine import Engine
from gradwire.engine.step import run_rounds
from gradwire.errors import ConfigError
from gradwire.local.base import LocalMethod, drift_plan
from gradwire.local.island import forms_of, local_part
from gradwire.local.optimizers import Optimizers
from gradwire.local.workers import Group
from gradwire.spec import compressor_of, format_spec
from gradwire.types import EFInput, EncodeContext, Mean, Rounds, State, mix


class BlockCSER(LocalMethod):
    """Averages some blocks of parameters after every step, and more every `sync_every` steps.

    Where a block is averaged, common + e becomes common + mean(e): its error is sent and reset at
    once, so no error buffer is needed. The compressors choose blocks that are the same on all
    workers (grbs, randomk); `errors` is for every `sync_every`-th step and `updates` for those
    between, or None to send nothing then. Parameters are sent in their own number format. As for
    CSER, momentum is local, and `averaged()` is for evaluation.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        updates: Compressor | str | None,
        errors: Compressor | str,
        *,
        sync_every: int,
        process_group: Group = None,
        seed: int = 0,
        broadcast: bool = False,
    ) -> None:
        LocalMethod.__init__(self, model, optimizer, sync_every, process_group, seed, broadcast)
        self._errors = self._make_engine(errors, mix(seed, 1))
        self._updates = None if updates is None else self._make_engine(updates, mix(seed, 2))

    def settings(self) -> dict[str, object]:
        errors = {"errors": self._errors.plan.identity()}
        return {**errors, "updates": self._updates and self._updates.plan.identity()}

    def planned_ratio(self) -> float:
        """Returns R of 1/R = (1 - 1/H)/R_C2 + 1/(R_C1 H): errors replace the update."""
        share = 1 / self.sync_every
        sent = share * self._block_bytes(self._errors)
        if self._updates is not None:
            sent += (1 - share) * self._block_bytes(self._updates)
        return sum(form.nbytes for form in self._errors.tensors.values()) / sent

    def _block_bytes(self, engine: Engine) -> int:
        """Returns the bytes of the blocks that are averaged at one step."""
        return sum(
            form.itemsize * _count(engine.lanes[name].compressor, form.numel())
            for name, form in engine.tensors.items()
        )

    def _initialize(self) -> None:
        pass

    def _step(self) -> None:
        is_reset = self.steps % self.sync_every == 0
        self.syncs += is_reset
        engine = self._errors if is_reset else self._updates
        if engine is not None:
            self._workers.run(self._sync(engine))

    def _sync(self, engine: Engine) -> CollectiveProgram[None]:
        rounds = []
        for name, parameter in self.parameters.items():
            lane = engine.lanes[name]
            ctx = lane.ctx._replace(step=self.steps)
            rounds.append(_mean_of_blocks(local_part(parameter), lane.compressor, ctx))
        yield from run_rounds(rounds)

    def _engines(self) -> Sequence[Engine]:
        return [self._errors] if self._updates is None else [self._updates, self._errors]

    def _tensors(self) -> dict[str, State]:
        return {}

    def _common(self) -> Mapping[str, Tensor]:
        # Workers differ in all but the blocks of the last step.
        return {}

    def _make_engine(self, compressor: Compressor | str, seed: int) -> Engine:
        rank, size, tensors = self._workers.rank, self._workers.size, forms_of(self.parameters)
        chosen = compressor_of(compressor)
        is_shared = isinstance(chosen, Sparsifier) and not chosen.sends_indices
        if not is_shared and chosen.family != "dense":
            raise ConfigError(
                f"BlockCSER: {format_spec(chosen)} does not choose the same entries on all "
                "workers; use grbs or randomk, or CSER, which takes any contraction"
            )
        if isinstance(chosen, Sparsifier) and chosen.values != "fp32":
            raise ConfigError(
                f"BlockCSER: {format_spec(chosen)} would round parameters and not only messages "
                "about them; leave out values, which go in the parameters' own format"
            )
        plan = drift_plan("BlockCSER", chosen, "none", "mean", tensors.values(), size)
        return Engine(plan, tensors, rank, size, seed, "ignore")


def _count(compressor: Compressor, numel: int) -> int:
    return compressor.count(numel) if isinstance(compressor, Sparsifier) else numel


def _mean_of_blocks(parameter: Tensor, compressor: Compressor, ctx: EncodeContext) -> Rounds:
    """Replaces the chosen entries, or all if it is dense, by their mean over workers."""
    flat = parameter.reshape(-1)
    if isinstance(compressor, Sparsifier):
        index = compressor.select(EFInput(flat), ctx)
        [[mean]] = yield Mean((flat[index],))
        flat.index_copy_(0, index, mean)
    else:
        [[mean]] = yield Mean((flat.clone(),))
        flat.copy_(mean)
    if flat.data_ptr() != parameter.data_ptr():
        parameter.copy_(flat.view(parameter.shape))
    return flat
