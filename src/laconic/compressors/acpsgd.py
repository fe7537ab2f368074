"""ACP-SGD: PowerSGD with one factor a step, so that one mean is enough."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.checks import check_whole
from laconic.contract import ManyRounds, Traits
from laconic.kernels.reference.random import random_bits
from laconic.matrix import matrix_shape, orthonormal
from laconic.types import Given, Mean, Payload, Rounds, State, Turn, mix

ANEW = 100
"""After so many steps a column of the subspace is drawn anew. Even, for the shorter side."""


@dataclass(frozen=True)
class AcpSGD(ManyRounds):
    """Sends one factor of a gradient M ≈ P Qᵀ with `rank` columns: P on even steps, Q on odd ones.

    On an even step Q of the step before is made orthonormal and P is the mean of M Q; on an odd one
    the parts are swapped. Each worker has then said the projection of its M on a subspace that all
    know: half of PowerSGD's bytes, in one round. A projection never adds error, and from a random
    start it says rank/n of the squared norm on average, n the shorter side; but of what is at right
    angles to the subspace it says nothing. So every 100th step draws one column anew and says 1/n
    on average, whatever came before: a contraction over 100 steps. A gradient of that rank which
    stays the same is all said with every second step. NaN and infinity show in the result, and do
    not stay in the factors.
    """

    rank: int = 1

    how: ClassVar = "mean"
    examples: ClassVar = ({"rank": 1}, {"rank": 4})
    family: ClassVar = "low rank"
    paper: ClassVar = "Zhang et al. 2023, arXiv:2306.08881"

    def __post_init__(self) -> None:
        check_whole("acpsgd", "rank", self.rank, 1)

    def traits(self) -> Traits:
        return Traits(summable=True, contraction=True)

    def state(self, turn: Turn, device: torch.device) -> State:
        rows, cols = matrix_shape(turn.shape)
        rank = min(self.rank, rows, cols)
        # The same start on every rank. P has one too: a lane may begin on an odd step. P has the
        # longer side, so that the first step projects on the shorter.
        generator = torch.Generator().manual_seed(mix(turn.seed, turn.lane) >> 1)
        p = torch.randn(max(rows, cols), rank, generator=generator)
        q = torch.randn(min(rows, cols), rank, generator=generator)
        return {"p": p.to(device), "q": q.to(device)}

    def rounds(self, given: Given, state: State, turn: Turn) -> Rounds:
        new, old = _factors(turn)
        m = _turned(given.total().view(matrix_shape(turn.shape)), turn)
        base = _base(state[old], turn)
        own = m @ base
        if given.left is not None:
            m.addmm_(own, base.T, alpha=-1)
        [(mean,)] = yield Mean((own,))
        # A column that is zero, or no number, would stay so for ever: it keeps what it was.
        size = mean.norm(dim=0, dtype=torch.float64)
        state[new] = torch.where((size > 0) & size.isfinite(), mean, state[new])
        return _turned(mean @ base.T, turn).reshape(-1)

    def encode(self, x: Tensor, turn: Turn | None = None) -> Payload:
        turn = turn or Turn(tuple(x.shape))
        m = _turned(x.detach().to(torch.float32).reshape(matrix_shape(turn.shape)), turn)
        own = m @ self._start(turn, x.device)
        return Payload((own,), turn, own.nbytes)

    def decode(self, payload: Payload) -> Tensor:
        [own] = payload.parts
        said = own @ self._start(payload.turn, own.device).T
        return _turned(said, payload.turn).reshape(payload.turn.shape)

    def nbytes(self, shape: Sequence[int]) -> int:
        """The larger factor, which even steps say."""
        rows, cols = matrix_shape(shape)
        return 4 * min(self.rank, rows, cols) * max(rows, cols)

    def _start(self, turn: Turn, device: torch.device) -> Tensor:
        return _base(self.state(turn, device)[_factors(turn)[1]], turn)


def _factors(turn: Turn) -> tuple[str, str]:
    """Which factor this step says, and on which it projects."""
    return ("p", "q") if turn.step % 2 == 0 else ("q", "p")


def _base(factor: Tensor, turn: Turn) -> Tensor:
    """Orthonormal columns of the subspace; now and then with a random one for the last."""
    if turn.step and turn.step % ANEW == 0:
        coins = random_bits(turn.shared_key(), factor.shape[0], factor.device) & 1
        drawn = (1 - 2 * coins).to(factor.dtype).unsqueeze(1)
        factor = torch.cat([factor[:, :-1], drawn[:, : factor.shape[1]]], dim=1)
    return orthonormal(factor)


def _turned(m: Tensor, turn: Turn) -> Tensor:
    """The matrix with the side of this step's factor first, or back again."""
    rows, cols = matrix_shape(turn.shape)
    return m.T if (rows < cols) != (turn.step % 2 == 1) else m
