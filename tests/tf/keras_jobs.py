"""Jobs of the Keras tests. Each runs on every rank and returns plain values."""

import io
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gradwire
from gradwire.bench.microbench.keras_steps import compare
from gradwire.integrations.keras.tensorflow import _from_torch, _to_torch

SIZES = (31, 67, 33, 10)
"""Odd sizes, so that most gradients are not aligned for TensorFlow."""


def mlp() -> keras.Sequential:
    keras.utils.set_random_seed(0)
    # Names would otherwise count the models that this process has made.
    keras.backend.clear_session()
    layers = [keras.layers.Dense(n, activation="relu") for n in SIZES[1:]]
    return keras.Sequential([keras.Input((SIZES[0],)), *layers])


def data(rank: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(rank)
    x = generator.normal(size=(64, SIZES[0])).astype("float32")
    return x, generator.normal(size=(64, SIZES[-1])).astype("float32")


def weights(model: keras.Model) -> Tensor:
    return torch.cat([torch.tensor(w).reshape(-1) for w in model.get_weights()])


def failure_of(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no failure"


def fit(model: keras.Model, optimizer: Any, epochs: int = 1, **options: Any) -> Tensor:
    model.compile(optimizer, "mse", **options)
    model.fit(*data(dist.get_rank()), batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return weights(model)


def fit_job(spec: str, together: int = 4) -> tuple[Tensor, Any]:
    """Trains one model on four ranks, or one on each pair."""
    mesh = init_device_mesh("cpu", (4 // together, together), mesh_dim_names=("apart", "as_one"))
    optimizer = gradwire.keras.DistributedOptimizer(
        keras.optimizers.SGD(0.1), spec, process_group=mesh["as_one"], check_every=3
    )
    found = fit(mlp(), optimizer)
    stats = optimizer.gradwire.stats()
    optimizer.gradwire.detach()
    assert "apply" not in vars(optimizer)
    return found, stats


def torch_fit_job() -> Tensor:
    """Trains in torch with equal weights, data and steps, and a mean by hand."""
    layers = []
    for kernel, bias in zip(*[iter(mlp().get_weights())] * 2, strict=True):
        layer = nn.Linear(*kernel.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor(kernel.T))
            layer.bias.copy_(torch.tensor(bias))
        layers += [layer, nn.ReLU()]
    model = nn.Sequential(*layers)
    reducer = gradwire.Reducer(model, "none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = map(torch.tensor, data(dist.get_rank()))
    for some, wanted in zip(x.split(16), y.split(16), strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(some), wanted).backward()
        reducer.reduce()
        optimizer.step()
    reducer.detach()
    return torch.cat([p.detach().T.reshape(-1) for p in model.parameters()])


def against_torch_job(specs: list[str]) -> dict[str, tuple[bool, bool, bool]]:
    """Returns whether equal gradients become equal means, eagerly and inside a graph."""
    return {spec: _against_torch(spec) for spec in specs}


def _against_torch(spec: str) -> tuple[bool, bool, bool]:
    shapes = {"a/kernel": (67, 33), "a/bias": (33,), "b/kernel": (40, 51)}
    generator = torch.Generator().manual_seed(dist.get_rank())
    steps = [[torch.randn(s, generator=generator) for s in shapes.values()] for _ in range(3)]
    parameters = {n: nn.Parameter(torch.zeros(s)) for n, s in shapes.items()}
    ours = gradwire.Reducer(parameters.items(), spec)
    eager = gradwire.keras.Reducer(_variables(shapes), spec)
    traced = gradwire.keras.Reducer(_variables(shapes), spec)
    in_graph = tf.function(traced.reduce)
    same = [True, True]
    for gradients in steps:
        given = [tf.constant(g.numpy()) for g in gradients]
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = gradient.clone()
        ours.reduce()
        for i, reduce in enumerate((eager.reduce, in_graph)):
            means = [torch.tensor(mean.numpy()) for mean in reduce(given)]
            expected = [p.grad for p in parameters.values()]
            same[i] &= all(map(torch.equal, means, expected))
    bytes_ = [r.stats()["message_bytes"] for r in (eager, traced)]
    # A reducer of torch exchanges in every step which gradients exist, one byte per parameter;
    # with none from the third step on in its message, four bytes per parameter.
    flag_bytes = (len(steps) + 3 * (spec == "none")) * len(shapes)
    as_many = bytes_[0] == bytes_[1] == ours.stats()["message_bytes"] - flag_bytes
    for reducer in (ours, eager, traced):
        reducer.detach()
    return same[0], same[1], as_many


def _variables(shapes: dict[str, tuple[int, ...]]) -> list[tf.Variable]:
    return [tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()]


class Reader(keras.Model):
    """An embedding with a gradient of few rows, a layer for even ranks, and an unused one."""

    def __init__(self) -> None:
        keras.utils.set_random_seed(0)
        keras.backend.clear_session()
        keras.Model.__init__(self)
        self.words = keras.layers.Embedding(60, 24)
        self.sometimes = keras.layers.Dense(24, name="sometimes")
        self.never = keras.layers.Dense(24, name="never")
        self.last = keras.layers.Dense(3)
        for layer in (self.words, self.sometimes, self.never, self.last):
            layer.build((None, 24))

    def call(self, x: Any) -> Any:
        found = self.words(x)
        if dist.get_rank() % 2 == 0:
            found = self.sometimes(found)
        return self.last(found)


def tape_job(how: str) -> tuple[Tensor, bool, list[str], Any]:
    """Trains in a custom loop with a new tape in every step, eagerly or inside a graph."""
    model, optimizer = Reader(), keras.optimizers.SGD(0.1)
    variables = model.trainable_variables
    words = tf.constant(np.random.default_rng(dist.get_rank()).integers(60, size=(8, 5)))
    tapes, unused = [], []

    def step() -> None:
        with gradwire.keras.DistributedGradientTape(tf.GradientTape(), "efsign") as tape:
            loss = tf.reduce_mean(model(words) ** 2)
        means = tape.gradient(loss, variables)
        tapes.append(tape)
        unused[:] = [v.path for v, mean in zip(variables, means, strict=True) if mean is None]
        optimizer.apply_gradients(zip(means, variables, strict=True))

    run = tf.function(step) if how == "graph" else step
    for _ in range(4):
        run()
    reducer = tapes[0].reducer
    stats = reducer.stats()
    reducer.detach()
    found = torch.cat([torch.tensor(v.numpy()).reshape(-1) for v in variables])
    return found, all(tape.reducer is reducer for tape in tapes), unused, stats


def shared_memory_job() -> dict[str, bool]:
    """Returns whether memory is shared where it can be, and gradients stay unchanged."""
    found = {}
    tensor = tf.random.normal((40, 50))
    shared = _to_torch(tensor)
    found["shared"] = shared.data_ptr() == _to_torch(tf.identity(tensor)).data_ptr()
    given = torch.randn(200)
    found["given"] = _to_torch(_from_torch(given)).data_ptr() == given.data_ptr()
    odd = _from_torch(given[3:])
    found["odd"] = _to_torch(odd).data_ptr() % 64 == 0 and bool(np.array_equal(odd, given[3:]))
    found["alone"] = _leaves_gradients_unchanged(1)
    found["twice"] = _leaves_gradients_unchanged(2)
    return found


def _leaves_gradients_unchanged(count: int) -> bool:
    """Uses a constant as every variable's gradient in two steps; it must not change."""
    variables = [tf.Variable(tf.zeros((64, 32))) for _ in range(count)]
    reducer = gradwire.keras.Reducer(variables, "none")
    constant = np.full((64, 32), dist.get_rank(), dtype="float32")
    shared = tf.constant(constant)
    reduce = tf.function(lambda: reducer.reduce([shared] * count))
    reduce()
    means = reduce()
    reducer.detach()
    return all(bool(np.all(mean == 1.5)) for mean in means) and bool(np.all(shared == constant))


def resume_job(spec: str) -> tuple[bool, bool]:
    """Compares three epochs with two, a checkpoint and one more, residuals included."""
    optimizer = gradwire.keras.DistributedOptimizer(keras.optimizers.SGD(0.1), spec)
    model = mlp()
    fit(model, optimizer, 2)
    file = io.BytesIO()
    torch.save({"weights": weights(model), "gradwire": optimizer.gradwire.state_dict()}, file)
    values = model.get_weights()
    expected = fit(model, optimizer)
    optimizer.gradwire.detach()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = mlp()
    again.set_weights(values)
    other = gradwire.keras.DistributedOptimizer(keras.optimizers.SGD(0.1), spec)
    other.build(again.trainable_variables)
    other.gradwire.load_state_dict(saved["gradwire"])
    found = fit(again, other)
    norm = other.gradwire.stats()["residual_norm"]
    other.gradwire.switch("efsign")
    kept = other.gradwire.stats()["residual_norm"] == norm > 0
    other.gradwire.detach()
    return torch.equal(found, expected), kept


def overflow_job() -> tuple[Tensor, float, Any, Any]:
    """Overflows on rank 1 in its second batch, where all ranks must skip and halve the scale."""
    inner = keras.optimizers.SGD(0.1)
    optimizer = gradwire.keras.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0), "topk:ratio=0.1"
    )
    model = mlp()
    x, y = data(dist.get_rank())
    if dist.get_rank() == 1:
        x[20] = np.inf
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    stats = optimizer.gradwire.stats()
    optimizer.gradwire.detach()
    scale = float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))
    return weights(model), scale, stats, int(inner.iterations)


def names_job() -> list[str]:
    """Returns the names of variables that share one."""
    variables = [tf.Variable(tf.zeros((3, 3))) for _ in range(3)]
    reducer = gradwire.keras.Reducer(variables, "topk:ratio=0.1")
    own: Any = reducer.state_dict()[f"rank{dist.get_rank()}"]
    reducer.detach()
    return list(own["lanes"])


def saved_job(folder: str) -> str:
    """Loads a saved model in a process without Gradwire."""
    optimizer = gradwire.keras.DistributedOptimizer(keras.optimizers.SGD(0.1), "efsign")
    model = mlp()
    fit(model, optimizer)
    path = f"{folder}/{dist.get_rank()}.keras"
    model.save(path)
    optimizer.gradwire.detach()
    again = keras.models.load_model(path)
    assert torch.equal(weights(again), weights(model))
    return f"{type(again.optimizer).__name__} {int(again.optimizer.iterations)}"


def refusals_job() -> dict[str, str]:
    found = {}
    distributed = gradwire.keras.DistributedOptimizer
    sgd = keras.optimizers.SGD
    found["spec"] = failure_of(lambda: distributed(sgd(), "top_k"))
    found["option"] = failure_of(lambda: distributed(sgd(), "efsign", sed=1))
    found["optimizer"] = failure_of(lambda: distributed("sgd", "efsign"))
    once = distributed(sgd(0.1), "efsign")
    found["twice"] = failure_of(lambda: distributed(once, "efsign"))
    keras.config.set_dtype_policy("mixed_float16")
    found["half"] = failure_of(lambda: distributed(sgd(), "efsign"))
    keras.config.set_dtype_policy("float32")
    found["xla"] = failure_of(lambda: fit(mlp(), distributed(sgd(), "efsign"), jit_compile=True))
    with tf.distribute.OneDeviceStrategy("cpu:0").scope():
        found["strategy"] = failure_of(lambda: gradwire.keras.Reducer([tf.Variable(0.0)], "efsign"))
    model = mlp()
    fit(model, once)
    again = distributed(sgd(0.1), "efsign")
    found["claimed"] = failure_of(lambda: fit(model, again))
    found["later"] = failure_of(
        lambda: once.gradwire.reduce([None], [tf.Variable(1.0, name="new")])
    )
    found["count"] = failure_of(lambda: once.gradwire.reduce([None]))
    reducer = once.gradwire
    reducer.detach()
    found["detached"] = failure_of(lambda: reducer.reduce([None] * 6))
    variables = _variables({"x": (3,), "y": (3,)})
    reducer = gradwire.keras.Reducer(variables, "efsign")
    reducer.reduce([tf.ones(3), None])
    found["late"] = failure_of(lambda: reducer.reduce([tf.ones(3), tf.ones(3)]))
    tape = gradwire.keras.DistributedGradientTape
    found["both"] = failure_of(lambda: tape(tf.GradientTape(), reducer, seed=1))
    reducer.detach()
    found["type"] = failure_of(lambda: gradwire.keras.Reducer([tf.Variable(1)], "efsign"))
    found["nothing"] = failure_of(lambda: gradwire.keras.Reducer([], "efsign"))
    drifted = mlp()
    drifted.trainable_variables[2].assign_add([[float(dist.get_rank() == 2)] * 33] * 67)
    found["drift"] = failure_of(lambda: fit(drifted, distributed(sgd(), "efsign")))
    return found


def raised_job() -> str:
    """Returns the error that TensorFlow raises for an error inside a graph."""
    variables = _variables({"x": (64, 32)})
    reducer = gradwire.keras.Reducer(variables, "topk:ratio=0.1", nan_policy="raise")
    gradient = np.full((64, 32), np.inf if dist.get_rank() == 1 else 1.0, dtype="float32")
    text = failure_of(lambda: tf.function(reducer.reduce)([tf.constant(gradient)]))
    reducer.detach()
    return text


def example_job(*args: object) -> Any:
    """Returns the result of the example's `train`."""
    file = Path(__file__).parents[2] / "examples" / "keras_fit.py"
    spec = spec_from_file_location("example_keras_fit", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train(*args)


def timing_job(*args: Any) -> Any:
    return compare(*args)
