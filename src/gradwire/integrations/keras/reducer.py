"""Reducer: averages gradients of Keras and TensorFlow over a torch process group."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.comm.base import Collective, run_program
from gradwire.comm.consistency import check_equal_tensors
from gradwire.engine.make_plan import make_plan
from gradwire.engine.ownership import check_free, claim, release
from gradwire.errors import ConfigError
from gradwire.integrations.handle import Handle
from gradwire.integrations.keras.variables import framework_of, name_of, names_of, placeholder
from gradwire.integrations.parameters import group_of
from gradwire.integrations.reducer import messages
from gradwire.integrations.settings import Options, Settings, settings_of
from gradwire.policies import MethodSpec

if TYPE_CHECKING:
    from typing_extensions import Unpack

UNKNOWN_SCALE = 0.0
"""Stands for a loss scale that is not passed with the gradients."""


class Reducer(Handle):
    """Averages the gradients of variables over all ranks, until `detach`.

    Made on all ranks of the group, which check that their settings agree, and in the first `reduce`
    that their variables are equal: nothing broadcasts them. There they also exchange, once, which
    gradients they have: one that is missing on all ranks stays None, and one that is missing on
    some counts as zero there, then and later.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        compressor: MethodSpec | Settings,
        *,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        **options: "Unpack[Options]",
    ) -> None:
        settings = settings_of(compressor, options)
        settings.refuse_auto("keras")
        settings.refuse("reducer", "least_bytes", "chunk_bytes")
        self._framework = framework = framework_of(variables)
        framework.check()
        names = names_of(variables)
        check_free(zip(variables, names, strict=True))
        placeholders = {
            placeholder(v, framework.device(v)): name
            for v, name in zip(variables, names, strict=True)
        }
        tensors: dict[str, Tensor] = {name: p for p, name in placeholders.items()}
        group = group_of(process_group)
        Handle.__init__(self, group, tensors, placeholders, make_plan, settings)
        self._variables = list(variables)
        self._wanted: list[bool] | None = None
        self._attached = True
        self.when_detached: Callable[[], None] = lambda: None
        claim(variables, self)

    def _close(self) -> None:
        self._attached = False
        release(self._variables, self)
        self.when_detached()

    def _is_in_backward(self) -> bool:
        # Gradients are exchanged by `reduce` alone, which the backend calls after backward.
        return False

    def _count_framework_passes(self) -> None:
        pass

    def _prepare_own_exchange(self, requester: str) -> Callable[[], None]:
        return lambda: None

    def _complete_step(self) -> None:
        pass

    def _is_attached(self) -> bool:
        return self._attached

    def is_for(self, variables: Sequence[Any]) -> bool:
        """Returns whether it was made for exactly these variables."""
        # Variables compare by value.
        return [id(v) for v in self._variables] == [id(v) for v in variables]

    def reduce(
        self, gradients: Sequence[Any], variables: Any = None, scale: Any = UNKNOWN_SCALE
    ) -> list[Any]:
        """Returns the means over ranks of these gradients; None stays None if no rank has one.

        They are those of the given variables, or else of all variables in order. `scale` is their
        loss scale, if that is not left to `loss_scale_changed`. Inside a graph this adds the
        exchange to it.
        """
        return self._framework.without_autograph(self._reduce)(gradients, variables, scale)

    def _reduce(self, gradients: Sequence[Any], variables: Any, scale: Any) -> list[Any]:
        self._check_attached()
        self._framework.check()
        requested = self._gradient_indices(gradients, variables)
        own = [
            gradients[requested[i]] if i in requested else None for i in range(len(self._variables))
        ]
        if self._wanted is None:
            self._wanted = self._gather_wanted(own)
            self._check_equal_variables()
        self._check_expected(own)
        some = [i for i, wanted in enumerate(self._wanted) if wanted]
        means = self._framework.apply_work(
            self._exchange, [self._dense_or_zeros(own, i) for i in some], scale
        )
        found = dict(zip(some, means, strict=True))
        return [found.get(i) for i in requested]

    def _gradient_indices(self, gradients: Sequence[Any], variables: Any) -> dict[int, int]:
        """Maps indices among all variables to indices among the given ones and their gradients."""
        variables = self._variables if variables is None else list(variables)
        if len(gradients) != len(variables):
            raise ConfigError(f"reduce: {len(gradients)} gradients of {len(variables)} variables")
        indices = {id(variable): index for index, variable in enumerate(self._variables)}
        unknown = [name_of(v) for v in variables if id(v) not in indices]
        if unknown:
            raise ConfigError(
                f"reduce: {unknown} came after this reducer was made; detach it and make a new one"
            )
        return {indices[id(variable)]: i for i, variable in enumerate(variables)}

    def _gather_wanted(self, gradients: Sequence[Any]) -> list[bool]:
        """Returns for every variable whether any rank has its gradient."""
        own = torch.tensor([g is not None for g in gradients], device=self._device)
        gathered = self._check_comm.run(
            Collective("gather", [own.view(torch.uint8)], [own.numel()] * self._comm.size)
        )
        some: list[bool] = torch.stack(gathered).any(0).tolist()
        return some

    def _check_expected(self, gradients: Sequence[Any]) -> None:
        assert self._wanted is not None
        expected = zip(self._parameters.values(), gradients, self._wanted, strict=True)
        late = [name for name, g, wanted in expected if g is not None and not wanted]
        if late:
            raise ConfigError(
                f"reduce: {late} had no gradient on any rank in the first step; other ranks do not "
                "expect one now. Detach and make a new reducer, on all ranks"
            )

    def _dense_or_zeros(self, gradients: Sequence[Any], index: int) -> Any:
        gradient = gradients[index]
        if gradient is None:
            return self._framework.zeros_like(self._variables[index])
        return self._framework.dense(gradient)

    def _exchange(self, gradients: list[Tensor], scale: float) -> list[Tensor]:
        """Runs one step; returns the means and leaves the gradients unchanged."""
        self._check_attached()
        assert self._wanted is not None
        if scale != UNKNOWN_SCALE:
            self._engine.loss_scale_changed(scale)
        some = [p for p, wanted in zip(self._parameters, self._wanted, strict=True) if wanted]
        given = dict(zip(some, gradients, strict=True))
        means: dict[nn.Parameter, Tensor] = {}
        for message in messages(some):
            copies = _contiguous_copies([given[p] for p in message])
            run_program(
                self._engine.bucket_program([self._parameters[p] for p in message], copies),
                self._comm,
            )
            means |= zip(message, copies, strict=True)
        self._engine.end_step()
        if self._is_check_due():
            self._check_equal_variables()
        self._end_step()
        return [means[p].to(given[p].dtype) for p in some]

    def _check_equal_variables(self) -> None:
        values = self._framework.values(self._variables)
        check_equal_tensors(
            self._check_comm, dict(zip(self._parameters.values(), values, strict=True))
        )


def _contiguous_copies(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Copies gradients into one buffer, since a step works in place and must not change them."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    pieces = flat.split([gradient.numel() for gradient in gradients])
    return [piece.view(g.shape) for piece, g in zip(pieces, gradients, strict=True)]
