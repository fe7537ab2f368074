"""The settings of all boundaries of a pipeline, equal on all ranks."""

from dataclasses import dataclass, replace

from gradwire.base import Compressor, OneRound
from gradwire.errors import ConfigError
from gradwire.identity import code_digests, identity_of
from gradwire.stages.boundary import Settings
from gradwire.stages.gravac import StageGraVAC
from gradwire.stages.method import DIRECTIONS, Direction, stage_method
from gradwire.stages.samples import SampleMemory
from gradwire.version import VERSION


@dataclass(frozen=True)
class StageSettings:
    """Methods by direction, sample memory, controller, and the seed of random methods."""

    activations: OneRound
    gradients: OneRound
    memory: SampleMemory | None = None
    controller: StageGraVAC | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        ladder = self._ladder("activations") if self.memory is not None else ()
        for method in ladder:
            traits = method.traits()
            if not traits.contraction:
                raise ConfigError(
                    "attach_pipeline: memory='samples' needs a contraction, since both ends add "
                    f"up what is sent: {traits.why_not or f'{type(method).__name__} is none'}"
                )

    def at(self, lower: int, direction: Direction) -> Settings:
        """Returns the settings of one boundary in one direction; gradients have no memory."""
        memory = self.memory if direction == "activations" else None
        ladder = self._ladder(direction)
        return Settings(lower, direction, ladder, memory, self.controller, self.seed)

    def _ladder(self, direction: Direction) -> tuple[OneRound, ...]:
        method = self.activations if direction == "activations" else self.gradients
        if self.controller is None:
            return (method,)
        return self.controller.settings(direction, method)

    def with_methods(
        self, activations: Compressor | str | None, gradients: Compressor | str | None
    ) -> "StageSettings":
        """Returns these settings with other methods; None leaves one as it is."""
        found = self
        if activations is not None:
            found = replace(found, activations=stage_method("activations", activations))
        if gradients is not None:
            found = replace(found, gradients=stage_method("gradients", gradients))
        return found

    def identity(self) -> dict[str, object]:
        """Returns what ranks and saved states compare."""
        found: dict[str, object] = {"version": VERSION, "seed": self.seed}
        for direction in DIRECTIONS:
            ladder = self._ladder(direction)
            found[direction] = [identity_of(method) for method in ladder]
            found[f"{direction} code"] = {k: v for m in ladder for k, v in code_digests(m).items()}
        found["memory"] = None if self.memory is None else identity_of(self.memory)
        found["controller"] = None if self.controller is None else identity_of(self.controller)
        return found
