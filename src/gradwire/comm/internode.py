"""Calls between nodes, of which every rank of a node carries its share.

All ranks of a node make the same call, as if the node were one rank. Each takes one share of it
across to the ranks at its place in other nodes; then the ranks of a node tell each other what they
have heard. So every byte crosses between nodes once, over as many links as a node has ranks.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram, Subgroup, bounded
from gradwire.errors import WireError
from gradwire.types import InterNode


def relay(call: Collective, among: InterNode) -> CollectiveProgram[list[Tensor]]:
    """What a call among nodes is answered, one buffer a node where there are several."""
    node = among.node
    if call.kind in ("gather", "scatter") and call.sizes is None:
        told = yield from _told_sizes(call, among)
        call = replace(call, sizes=bounded(told, call.limits))
    sizes = None if call.sizes is None else [-(-n // node) for n in call.sizes]
    own = [_share(buffer, among) for buffer in call.buffers]
    heard = yield replace(call, buffers=own, sizes=sizes, ring=Subgroup(node, across=True))
    _check(heard, sizes or [own[0].numel()])
    flat = torch.cat(heard)
    said = flat.view(torch.uint8)
    known = [said.numel()] * node
    shares = yield Collective("gather", [said], known, ring=Subgroup(node, across=False))
    _check(shares, known)
    rows = torch.stack(shares).view(flat.dtype)  # [node, all that was heard across]
    lengths = call.sizes or [call.buffers[0].numel()]
    columns = rows.split([h.numel() for h in heard], dim=1)
    return [c.reshape(-1)[:n] for c, n in zip(columns, lengths, strict=True)]


def _share(buffer: Tensor, among: InterNode) -> Tensor:
    """This rank's of equal shares; the last ones may end in zeros."""
    length = -(-buffer.numel() // among.node)
    share = buffer.new_zeros(length)
    mine = buffer[among.place * length :][:length]
    share[: mine.numel()] = mine
    return share


def _told_sizes(call: Collective, among: InterNode) -> CollectiveProgram[list[int]]:
    """How many bytes each node will say to this one."""
    lengths = [torch.tensor([b.numel()], device=b.device).view(torch.uint8) for b in call.buffers]
    known = [torch.int64.itemsize] * among.nodes
    told = yield Collective(call.kind, lengths, known, ring=Subgroup(among.node, across=True))
    _check(told, known)
    return [int(size.view(torch.int64)) for size in told]


def _check(answers: list[Tensor], sizes: list[int]) -> None:
    """Raises WireError unless every answer has the length that was agreed on."""
    for answer, size in zip(answers, sizes, strict=True):
        if answer.numel() != size:
            raise WireError(f"share of {answer.numel()} bytes where {size} were agreed")
