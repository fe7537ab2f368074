"""Replicas that come and go, inside a torchft Manager."""

from gradwire.elastic.outer_loop import DiLoCo, SparseLoCo
from gradwire.elastic.reducer import ElasticReducer, attach

__all__ = ["DiLoCo", "ElasticReducer", "SparseLoCo", "attach"]
