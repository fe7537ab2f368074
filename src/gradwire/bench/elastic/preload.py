"""Imported once by the process that replicas are forked from: what takes seconds to load."""

import torch
import torchft  # noqa: F401

import gradwire
from gradwire.bench.faults.jobs import mlp

SPECS = ("topk:ratio=0.01", "int4", "chunktopk:k=64,chunk=4096 | codebook:bits=2")
"""Methods whose kernels are compiled, or loaded from disk."""

torch.set_num_threads(1)
_model = mlp(256)
for _spec in SPECS:
    _gradients = {name: torch.zeros_like(p) for name, p in _model.named_parameters()}
    gradwire.simulate(_model, _spec, workers=2).step([_gradients, _gradients])
