"""Jobs with Keras on torch; `KERAS_BACKEND` must be set before Keras is imported."""

import keras
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import gradwire


def fit_job(spec: str, scaled: bool) -> tuple[str, Tensor, dict[str, object]]:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(50, 24), keras.layers.Flatten(), keras.layers.Dense(5)]
    model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
    plain = keras.optimizers.Adam(0.01)
    chosen = keras.optimizers.LossScaleOptimizer(plain) if scaled else plain
    optimizer = gradwire.keras.DistributedOptimizer(chosen, spec, check_every=2)
    generator = np.random.default_rng(dist.get_rank())
    model.compile(optimizer, "mse")
    x, y = generator.integers(50, size=(48, 4)), generator.normal(size=(48, 5))
    model.fit(x, y, batch_size=16, verbose=0)
    stats = optimizer.gradwire.stats()
    optimizer.gradwire.detach()
    weights = torch.cat([torch.tensor(w).reshape(-1) for w in model.get_weights()])
    return keras.backend.backend(), weights, stats


def against_torch_job(spec: str, controller: str | None) -> bool:
    """Returns whether equal gradients become the same means as without Keras."""
    own = {name: keras.Variable(torch.zeros(40, 30), name=name) for name in ("a", "b")}
    ours = gradwire.keras.Reducer(list(own.values()), spec, controller=controller)
    names = {name: torch.nn.Parameter(torch.zeros(40, 30)) for name in own}
    plain = gradwire.Reducer(names.items(), spec, controller=controller)
    generator = torch.Generator().manual_seed(dist.get_rank())
    same = True
    for _ in range(3):
        gradients = [torch.randn(40, 30, generator=generator) for _ in own]
        for parameter, gradient in zip(names.values(), gradients, strict=True):
            parameter.grad = gradient.clone()
        plain.reduce()
        means = ours.reduce(gradients)
        same &= all(map(torch.equal, means, [p.grad for p in names.values()]))
    plain.detach()
    ours.detach()
    return same
