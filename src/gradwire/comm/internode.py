"""Collectives between nodes in which every rank of a node transfers its share.

All ranks of a node request the same collective, as if the node were one rank. Each transfers one
share of it between the ranks at its index in all nodes; then the ranks of a node gather the shares
that they received. So every byte crosses between nodes once, over as many links as a node has
ranks.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram, Subgroup, checked_sizes
from gradwire.errors import WireError
from gradwire.types import InterNode


def internode_collective(
    collective: Collective, scope: InterNode
) -> CollectiveProgram[list[Tensor]]:
    """Runs a collective whose ranks are nodes; gather and scatter return one buffer per node."""
    node = scope.node
    if collective.kind in ("gather", "all_to_all") and collective.sizes is None:
        announced = yield from _exchange_sizes(collective, scope)
        collective = replace(collective, sizes=checked_sizes(announced, collective.limits))
    sizes = None if collective.sizes is None else [-(-n // node) for n in collective.sizes]
    own = [_share(buffer, scope) for buffer in collective.buffers]
    across = Subgroup(node, internode=True)
    received = yield replace(collective, buffers=own, sizes=sizes, subgroup=across)
    _check_sizes(received, sizes or [own[0].numel()])
    flat = torch.cat(received)
    sent = flat.view(torch.uint8)
    known = [sent.numel()] * node
    within = Subgroup(node, internode=False)
    shares = yield Collective("gather", [sent], known, subgroup=within)
    _check_sizes(shares, known)
    rows = torch.stack(shares).view(flat.dtype)  # [node, all that was received from other nodes]
    lengths = collective.sizes or [collective.buffers[0].numel()]
    columns = rows.split([r.numel() for r in received], dim=1)
    return [c.reshape(-1)[:n] for c, n in zip(columns, lengths, strict=True)]


def _share(buffer: Tensor, scope: InterNode) -> Tensor:
    """Returns this rank's share; shares are equal in length, the last ones padded with zeros."""
    length = -(-buffer.numel() // scope.node)
    share = buffer.new_zeros(length)
    mine = buffer[scope.place * length :][:length]
    share[: mine.numel()] = mine
    return share


def _exchange_sizes(collective: Collective, scope: InterNode) -> CollectiveProgram[list[int]]:
    """Returns how many bytes each node will send to this one."""
    lengths = [
        torch.tensor([b.numel()], device=b.device).view(torch.uint8) for b in collective.buffers
    ]
    known = [torch.int64.itemsize] * scope.nodes
    across = Subgroup(scope.node, internode=True)
    sizes = yield Collective(collective.kind, lengths, known, subgroup=across)
    _check_sizes(sizes, known)
    return [int(size.view(torch.int64)) for size in sizes]


def _check_sizes(received: list[Tensor], sizes: list[int]) -> None:
    """Raises WireError unless every buffer has the announced length."""
    for buffer, size in zip(received, sizes, strict=True):
        if buffer.numel() != size:
            raise WireError(f"share of {buffer.numel()} bytes where {size} were agreed")
