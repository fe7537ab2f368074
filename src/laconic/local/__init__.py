"""Optimisers that talk rarely: every worker takes steps of its own, and tells how far it went."""

from laconic.local.block_cser import BlockCSER
from laconic.local.cser import CSER
from laconic.local.peers import Seat, simulated
from laconic.local.qsparse import QsparseLocalSGD

__all__ = ["CSER", "BlockCSER", "QsparseLocalSGD", "Seat", "simulated"]
