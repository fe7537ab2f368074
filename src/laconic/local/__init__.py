"""Optimisers that talk rarely: every worker takes steps of its own, and tells how far it went."""

from laconic.local.async_qsparse import AsyncQsparseLocalSGD
from laconic.local.block_cser import BlockCSER
from laconic.local.cser import CSER
from laconic.local.diloco import DiLoCo
from laconic.local.local_sgd import LocalSGD
from laconic.local.peers import Seat, simulated
from laconic.local.qsparse import QsparseLocalSGD
from laconic.local.sparseloco import SparseLoCo

__all__ = [
    "CSER",
    "AsyncQsparseLocalSGD",
    "BlockCSER",
    "DiLoCo",
    "LocalSGD",
    "QsparseLocalSGD",
    "Seat",
    "SparseLoCo",
    "simulated",
]
