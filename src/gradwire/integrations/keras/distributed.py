"""DistributedOptimizer for Keras and DistributedGradientTape for TensorFlow."""

from collections.abc import Sequence
from typing import Any

import keras

from gradwire.errors import ConfigError
from gradwire.integrations.keras.reducer import Reducer
from gradwire.integrations.keras.variables import framework_of, tensorflow
from gradwire.integrations.parameters import group_of
from gradwire.integrations.settings import Settings, settings_of
from gradwire.policies import MethodSpec, check_method


def DistributedOptimizer(optimizer: Any, compressor: MethodSpec | Settings, **options: Any) -> Any:
    """Makes the optimiser average gradients over all ranks before it steps, and returns it.

    Options are those of `Reducer`, which is made when the optimiser gets its variables: in the
    first step, or by `optimizer.build(variables)`. From then on it is `optimizer.gradwire`.
    """
    _check_optimizer(optimizer)
    _check_arguments(compressor, options)
    build, apply = optimizer.build, optimizer.apply

    def restore_methods() -> None:
        # Deleting instance attributes makes those of the class visible again.
        del optimizer.build, optimizer.apply, optimizer.gradwire

    def reducer_of(variables: Sequence[Any]) -> Reducer:
        if "gradwire" not in vars(optimizer):
            optimizer.gradwire = Reducer(variables, compressor, **options)
            optimizer.gradwire.when_detached = restore_methods
        reducer: Reducer = optimizer.gradwire
        return reducer

    def reducing_build(variables: Sequence[Any]) -> None:
        reducer_of(list(variables))
        build(variables)

    def reducing_apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
        variables = list(
            optimizer._trainable_variables if trainable_variables is None else trainable_variables
        )
        means = reducer_of(variables).reduce(list(grads), variables, _loss_scale(optimizer))
        apply(means, variables)

    if optimizer.built:
        reducer_of(optimizer._trainable_variables)
    optimizer.build, optimizer.apply = (
        reducing_build,
        framework_of([]).without_autograph(reducing_apply),
    )
    return optimizer


class DistributedGradientTape:
    """A tape whose `gradient` returns means over all ranks; all else is the tape's own.

    A tape lasts one step, so all tapes of the same variables share a reducer, `tape.reducer`, which
    the first of them makes. A reducer can also be passed instead of a spec.
    """

    def __init__(
        self, tape: Any, compressor: MethodSpec | Settings | Reducer, **options: Any
    ) -> None:
        if isinstance(compressor, Reducer) and options:
            raise ConfigError(f"tape: {sorted(options)} are settings of the reducer that was given")
        if not isinstance(compressor, Reducer):
            _check_arguments(compressor, options)
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
        """Returns the tape's gradients, averaged; sources are the same variables in every step."""
        gradients = self._tape.gradient(target, sources, *args, **kwargs)
        return self._framework.without_autograph(self._means)(gradients, sources)

    def _means(self, gradients: Any, sources: Any) -> Any:
        variables = keras.tree.flatten(sources)
        self.reducer = self._reducer_of(variables)
        means = self.reducer.reduce(keras.tree.flatten(gradients), variables)
        return keras.tree.pack_sequence_as(sources, means)

    def _reducer_of(self, variables: list[Any]) -> Reducer:
        if isinstance(self._wanted, Reducer):
            return self._wanted
        requested = (self._wanted, self._options)
        # A tape lasts one step, so the shared reducer is stored in the first variable.
        known: tuple[object, Reducer] | None = vars(variables[0]).get("gradwire")
        if known is None or not known[1].is_for(variables):
            known = requested, Reducer(variables, self._wanted, **self._options)
            variables[0].gradwire = known
        if known[0] != requested:
            raise ConfigError(
                f"tape: the reducer of these variables was made with {known[0]}, got {requested}; "
                "use the reducer's switch"
            )
        return known[1]


def _loss_scale(optimizer: Any) -> Any:
    """Returns the factor by which the loss, and so the gradients, were multiplied."""
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


def _check_arguments(compressor: MethodSpec | Settings, options: dict[str, Any]) -> None:
    """Raises errors in the arguments now instead of when the variables are known."""
    own = {name: value for name, value in options.items() if name != "process_group"}
    settings = settings_of(compressor, own)
    settings.refuse_auto("keras")
    check_method(settings.first_method())
    group_of(options.get("process_group"))
