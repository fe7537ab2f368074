"""Decentralised optimizers: workers exchange compressed messages with their neighbors alone."""

from gradwire.decentralized.beer import BEER
from gradwire.decentralized.cgt import CGT
from gradwire.decentralized.choco import ChocoSGD
from gradwire.decentralized.dsgd import DSGD
from gradwire.decentralized.mixing import Mixing
from gradwire.decentralized.topology import (
    Complete,
    Exponential,
    Graph,
    OnePeerExponential,
    Ring,
    Star,
    Topology,
    Torus,
    Weights,
)
from gradwire.local.workers import SimulatedWorker, simulated

__all__ = [
    "BEER",
    "CGT",
    "DSGD",
    "ChocoSGD",
    "Complete",
    "Exponential",
    "Graph",
    "Mixing",
    "OnePeerExponential",
    "Ring",
    "SimulatedWorker",
    "Star",
    "Topology",
    "Torus",
    "Weights",
    "simulated",
]
