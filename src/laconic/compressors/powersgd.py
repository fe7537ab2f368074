"""PowerSGD: the best low-rank picture of a gradient that one step of power iteration finds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.checks import check_whole
from laconic.contract import ManyRounds, Traits
from laconic.matrix import matrix_shape, orthonormal
from laconic.types import Given, Mean, Payload, Rounds, State, Turn, mix


@dataclass(frozen=True)
class PowerSGD(ManyRounds):
    """Sends a gradient M as P Qᵀ with `rank` columns, in two rounds of plain means.

    P is the mean of M Q for last step's Q, made orthonormal; the new Q is the mean of Mᵀ P. Each
    worker has then said P Pᵀ M, the projection of its M on the common P, which never adds error. It
    is exact where the mean gradient has rank `rank` at most. From a random start it says rank/n of
    the squared norm on average at least, n the number of columns; Q then turns towards what is
    large and stays (power iteration). Zeros are said as zeros and leave Q as it was; NaN and
    infinity show in the result, and do not stay in Q.
    """

    rank: int = 1

    how: ClassVar = "mean"
    examples: ClassVar = ({"rank": 1}, {"rank": 4})
    family: ClassVar = "low rank"
    paper: ClassVar = "Vogels, Karimireddy & Jaggi 2019, arXiv:1905.13727"

    def __post_init__(self) -> None:
        check_whole("powersgd", "rank", self.rank, 1)

    def traits(self) -> Traits:
        return Traits(summable=True, contraction=True)

    def state(self, turn: Turn, device: torch.device) -> State:
        rows, cols = matrix_shape(turn.shape)
        rank = min(self.rank, rows, cols)
        # The same start on every rank, and a different one for every parameter.
        generator = torch.Generator().manual_seed(mix(turn.seed, turn.lane) >> 1)
        return {"q": torch.randn(cols, rank, generator=generator).to(device)}

    def rounds(self, given: Given, state: State, turn: Turn) -> Rounds:
        m = given.total().view(matrix_shape(turn.shape))  # [rows, cols]
        [(p,)] = yield Mean((m @ state["q"],))  # [rows, rank]
        p = orthonormal(p)
        own = m.T @ p
        if given.left is not None:
            m.addmm_(p, own.T, alpha=-1)
        [(q,)] = yield Mean((own,))  # [cols, rank]
        # Where this gradient is zero, or no number, Q would stay so for ever: it keeps its start.
        size = q.norm(dim=0, dtype=torch.float64)
        state["q"] = torch.where((size > 0) & size.isfinite(), q, state["q"])
        return (p @ q.T).view(-1)

    def encode(self, x: Tensor, turn: Turn | None = None) -> Payload:
        turn = turn or Turn(tuple(x.shape))
        m = x.detach().to(torch.float32).reshape(matrix_shape(turn.shape))
        p = orthonormal(m @ self.state(turn, x.device)["q"])
        return Payload((p, m.T @ p), turn, self.nbytes(turn.shape))

    def decode(self, payload: Payload) -> Tensor:
        p, q = payload.parts
        return (p @ q.T).view(payload.turn.shape)

    def nbytes(self, shape: Sequence[int]) -> int:
        rows, cols = matrix_shape(shape)
        return 4 * min(self.rank, rows, cols) * (rows + cols)
