"""The interface through which a controller follows the steps of an engine."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.engine.piggyback import Piggyback
from gradwire.engine.plan import Plan
from gradwire.engine.step import Lane


class StepObserver(ABC):
    """Receives what happens in each step, and may reconfigure lanes between two steps.

    The engine calls every method on all ranks in the same order. Statistics that an observer wants
    to average over ranks travel with the messages of a bucket (`piggyback`).
    """

    @property
    @abstractmethod
    def pending(self) -> bool:
        """True if the statistics of the last step are still on the GPU, so that reading blocks."""

    @property
    @abstractmethod
    def is_measuring(self) -> bool:
        """True if the next step does extra work and so must not be replayed as a CUDA graph."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """True if the next step needs no statistics, and may be averaged as plain DDP would."""

    @abstractmethod
    def check_plan(self, plan: Plan) -> None:
        """Raises ConfigError if the observer cannot work with this plan."""

    @abstractmethod
    def plan_changed(self, plan: Plan, lanes: Mapping[str, Lane], step: int) -> None:
        """Takes over the lanes of another plan, from this step on."""

    @abstractmethod
    def bucket_started(
        self, names: Sequence[str], grads: Sequence[Tensor], loss_scale: float
    ) -> None:
        """Reads the gradients of a bucket before they are exchanged."""

    @abstractmethod
    def piggyback(self, names: Sequence[str], device: torch.device) -> Piggyback | None:
        """Returns the statistics to average along with the bucket's messages, if there are any."""

    @abstractmethod
    def bucket_ended(self, names: Sequence[str], statistics: Tensor | None) -> None:
        """Receives the statistics of a bucket, averaged over ranks."""

    @abstractmethod
    def step_ended(self) -> None:
        """Starts copying the step's statistics to the host; all buckets have been exchanged."""

    @abstractmethod
    def step_committed(self, step: int, *, counts: bool) -> None:
        """Decides on the next step's settings; `counts` is False if the step was discarded."""

    @abstractmethod
    def learning_rate_changed(self, step: int, before: float, after: float) -> None: ...

    @abstractmethod
    def epoch_ended(self, step: int, learning_rate: float | None) -> None: ...

    @abstractmethod
    def world_size_changed(self) -> None:
        """Drops what depends on the number of ranks."""

    @abstractmethod
    def stats(self) -> dict[str, object]: ...

    @abstractmethod
    def state_dict(self) -> dict[str, object]: ...

    @abstractmethod
    def adopt_plan(self, state: object) -> None:
        """Switches the engine to the plan of a saved state, if the observer chooses plans."""

    @abstractmethod
    def load_state_dict(self, state: object) -> None: ...
