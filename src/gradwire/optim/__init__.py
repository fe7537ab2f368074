"""Optimisers that exchange each worker's update instead of its gradient.

The moments stay on their worker. As soon as the gradients of a DDP bucket are there, its update is
computed, compressed with error feedback and exchanged, during the backward pass.
"""

from gradwire.optim.adam_update import AdamUpdate
from gradwire.optim.adamw import Adam, AdamW
from gradwire.optim.demo import DeMo, DeMoUpdate
from gradwire.optim.dion import Dion, DionUpdate
from gradwire.optim.lion import Lion, LionUpdate
from gradwire.optim.muon import Muon, MuonUpdate
from gradwire.optim.onebit_adam import OneBitAdam, OneBitAdamUpdate
from gradwire.optim.sgd import SGDUpdate

__all__ = [
    "Adam",
    "AdamUpdate",
    "AdamW",
    "DeMo",
    "DeMoUpdate",
    "Dion",
    "DionUpdate",
    "Lion",
    "LionUpdate",
    "Muon",
    "MuonUpdate",
    "OneBitAdam",
    "OneBitAdamUpdate",
    "SGDUpdate",
]
