"""Optimizers with local steps: workers train alone and synchronise every few steps."""

from gradwire.local.async_qsparse import AsyncQsparseLocalSGD
from gradwire.local.block_cser import BlockCSER
from gradwire.local.cser import CSER
from gradwire.local.diloco import DiLoCo
from gradwire.local.local_sgd import LocalSGD
from gradwire.local.muloco import MuLoCo, muon_and_adamw
from gradwire.local.qsparse import QsparseLocalSGD
from gradwire.local.rejoin import RejoinedWorker
from gradwire.local.sparseloco import SparseLoCo
from gradwire.local.workers import SimulatedWorker, simulated

__all__ = [
    "CSER",
    "AsyncQsparseLocalSGD",
    "BlockCSER",
    "DiLoCo",
    "LocalSGD",
    "MuLoCo",
    "QsparseLocalSGD",
    "RejoinedWorker",
    "SimulatedWorker",
    "SparseLoCo",
    "muon_and_adamw",
    "simulated",
]
