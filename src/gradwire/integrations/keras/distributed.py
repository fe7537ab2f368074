"""DistributedOptimizer for Keras and DistributedGradientTape for TensorFlow."""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import keras

from gradwire.base import Compressor
from gradwire.control.base import find_controller
from gradwire.errors import ConfigError
from gradwire.integrations.keras.reducer import Reducer
from gradwire.integrations.keras.variables import framework_of, tensorflow
from gradwire.integrations.parameters import group_of
from gradwire.spec import compressor_of


def DistributedOptimizer(optimizer: Any, compressor: Compressor | str, **options: Any) -> Any:
    """The same optimiser, which from now on averages gradients over all ranks before it steps.

    Options are those of `Reducer`, which is made when the optimiser learns of its variables: in the
    first step, or by `optimizer.build(variables)`. From then on it is `optimizer.gradwire`.
    """
    _check_optimizer(optimizer)
    _check_asked(compressor, options)
    build, apply = optimizer.build, optimizer.apply

    def leave() -> None:
        # What stands in the instance hides what its class has.
        del optimizer.build, optimizer.apply, optimizer.gradwire

    def reducer_of(variables: Sequence[Any]) -> Reducer:
        if "gradwire" not in vars(optimizer):
            optimizer.gradwire = Reducer(variables, compressor, **options)
            optimizer.gradwire.when_detached = leave
        reducer: Reducer = optimizer.gradwire
        return reducer

    def mounted_build(variables: Sequence[Any]) -> None:
        reducer_of(list(variables))
        build(variables)

    def mounted_apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
        variables = list(
            optimizer._trainable_variables if trainable_variables is None else trainable_variables
        )
        means = reducer_of(variables).reduce(list(grads), variables, _loss_scale(optimizer))
        apply(means, variables)

    if optimizer.built:
        reducer_of(optimizer._trainable_variables)
    optimizer.build, optimizer.apply = mounted_build, framework_of([]).plainly(mounted_apply)
    return optimizer


class DistributedGradientTape:
    """A tape whose `gradient` gives means over all ranks; all else is the tape's own.

    Tapes come and go, so with a spec all those for the same variables share a reducer, which the
    first of them makes: `tape.reducer`. It can also be made before, and be given instead of a spec.
    """

    def __init__(self, tape: Any, compressor: Compressor | str | Reducer, **options: Any) -> None:
        if isinstance(compressor, Reducer) and options:
            raise ConfigError(f"tape: {sorted(options)} are settings of the reducer that was given")
        if not isinstance(compressor, Reducer):
            _check_asked(compressor, options)
        self._tape, self._wanted, self._options = tape, compressor, options
        self._framework = tensorflow()

    def __enter__(self) -> "DistributedGradientTape":
        self._tape.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """What the tape's own gives, averaged; sources are variables, the same in every step."""
        gradients = self._tape.gradient(target, sources, *args, **kwargs)
        return self._framework.plainly(self._means)(gradients, sources)

    def _means(self, gradients: Any, sources: Any) -> Any:
        variables = keras.tree.flatten(sources)
        self.reducer = self._reducer_of(variables)
        means = self.reducer.reduce(keras.tree.flatten(gradients), variables)
        return keras.tree.pack_sequence_as(sources, means)

    def _reducer_of(self, variables: list[Any]) -> Reducer:
        if isinstance(self._wanted, Reducer):
            return self._wanted
        asked = (self._wanted, self._options)
        # A tape lives for a step: it is the first variable that keeps what all of them share.
        known: tuple[object, Reducer] | None = vars(variables[0]).get("gradwire")
        if known is None or not known[1].is_for(variables):
            known = asked, Reducer(variables, self._wanted, **self._options)
            variables[0].gradwire = known
        if known[0] != asked:
            raise ConfigError(
                f"tape: the reducer of these variables was made with {known[0]}, got {asked}; use "
                "the reducer's switch"
            )
        return known[1]


def _loss_scale(optimizer: Any) -> Any:
    """By what the loss was multiplied, and so the gradients."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
    return optimizer.loss_scale_factor or 1.0


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(f"expected an optimiser of Keras 3, got {type(optimizer).__name__}")
    if "apply" in vars(optimizer):
        raise ConfigError(f"{optimizer.name}: averages its gradients already; detach that")
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if keras.config.dtype_policy().name == "mixed_float16" and not scales:
        raise ConfigError(
            f"{optimizer.name}: with mixed_float16 model.compile would put a LossScaleOptimizer "
            "around it, where ranks decide apart whether to step; put one inside: "
            "DistributedOptimizer(LossScaleOptimizer(optimizer), ...)"
        )


def _check_asked(compressor: Compressor | str, options: dict[str, Any]) -> None:
    """Raises now what would be raised only when variables are known."""
    signature(Reducer).bind([], compressor, **options)
    compressor_of(compressor)
    find_controller(options.get("controller"))
    group_of(options.get("process_group"))
