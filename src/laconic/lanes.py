"""All lanes of one model on one rank: what a link and a simulated worker have in common."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.base import Conversation
from laconic.comm.meter import Meter, ring_bytes
from laconic.errors import ConfigError
from laconic.plan import Plan
from laconic.step import Lane, exchange, together

FORMAT = 1
"""Version of the state dict."""


class Lanes:
    """The lanes by parameter name, their state, and their statistics."""

    def __init__(
        self, plan: Plan, tensors: Mapping[str, Tensor], rank: int, size: int, seed: int
    ) -> None:
        self.plan = plan
        self.rank, self.size, self.seed = rank, size, seed
        self.tensors = tensors
        self.lanes = {n: plan.lane(n, t, rank, size, seed) for n, t in tensors.items()}
        self.dense_bytes = 0

    def talk(self, names: Sequence[str], grads: Sequence[Tensor]) -> Conversation[list[Tensor]]:
        """The conversation about some parameters' gradients, which become their mean."""
        self.dense_bytes += ring_bytes(sum(g.nbytes for g in grads), self.size)
        return together(
            [exchange(g, self.lanes[name]) for name, g in zip(names, grads, strict=True)]
        )

    def switch(self, plan: Plan) -> None:
        """Changes the method; what the memory kept is kept where the new one keeps the same."""
        old = self.lanes
        self.plan = plan
        self.lanes = {
            name: plan.lane(name, tensor, self.rank, self.size, self.seed)
            for name, tensor in self.tensors.items()
        }
        for name, lane in self.lanes.items():
            lane.turn = lane.turn._replace(step=old[name].turn.step)
            if lane.kept.keys() == old[name].kept.keys():
                lane.kept = old[name].kept

    def rescale(self, factor: float) -> None:
        """Multiplies what waits to be sent, since the learning rate has changed by 1/`factor`."""
        for lane in self.lanes.values():
            lane.memory.rescale(lane.kept, factor)
            if lane.memory.owes:
                for key in lane.talk.keys() & set(lane.talker.owed):
                    lane.talk[key].mul_(factor)

    def steps(self) -> int:
        return max((lane.turn.step for lane in self.lanes.values()), default=0)

    def stats(self, meter: Meter) -> dict[str, object]:
        sent = meter.sent_bytes
        errors = [e for lane in self.lanes.values() if (e := lane.relative_error) is not None]
        waiting = [lane.memory.waiting(lane.kept) for lane in self.lanes.values()]
        norms = [tensor.norm() for tensor in waiting if tensor is not None]
        device = next(iter(self.tensors.values())).device if self.tensors else torch.device("cpu")
        return {
            **self.plan.describe(),
            "steps": self.steps(),
            "sent_bytes": sent,
            "received_bytes": meter.received_bytes,
            "message_bytes": meter.message_bytes,
            "dense_bytes": self.dense_bytes,
            "ratio": self.dense_bytes / sent if sent else 1.0,
            "calls": meter.calls,
            "encode_s": meter.encode_s,
            "wire_s": meter.wire_s,
            "decode_s": meter.decode_s,
            "relative_error": float(torch.stack(errors).nanmean()) if errors else 0.0,
            "residual_norm": float(torch.stack(norms).norm()) if norms else 0.0,
            "backend": kernels.chosen(device),
        }

    def state_dict(self) -> dict[str, object]:
        """Plain tensors and numbers, this rank's own."""
        lanes = {
            name: {
                "step": lane.turn.step,
                "kept": {k: t.clone() for k, t in lane.kept.items()},
                "talk": {k: t.clone() for k, t in lane.talk.items()},
            }
            for name, lane in self.lanes.items()
        }
        return {"format": FORMAT, "lanes": lanes, **self._identity()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Takes up exactly where the state was saved; refuses a state of another set-up."""
        expected = {"format": FORMAT, **self._identity()}
        for key, value in expected.items():
            if state.get(key) != value:
                raise ConfigError(f"state: {key} is {state.get(key)!r}, expected {value!r}")
        saved = state["lanes"]
        assert isinstance(saved, Mapping)
        if saved.keys() != self.lanes.keys():
            odd = sorted(saved.keys() ^ self.lanes.keys())
            raise ConfigError(f"state: parameters differ from the model's: {odd}")
        for name, lane in self.lanes.items():
            _load_lane(lane, saved[name])

    def _identity(self) -> dict[str, object]:
        return {**self.plan.describe(), "seed": self.seed, "rank": self.rank, "size": self.size}


def _load_lane(lane: Lane, saved: Mapping[str, object]) -> None:
    step = saved["step"]
    assert isinstance(step, int)
    for kind, here in (("kept", lane.kept), ("talk", lane.talk)):
        there = saved[kind]
        assert isinstance(there, Mapping)
        shapes = {k: tuple(t.shape) for k, t in there.items()}
        expected = {k: tuple(t.shape) for k, t in here.items()}
        if shapes != expected:
            raise ConfigError(f"state of {lane.name}: has {shapes}, expected {expected}")
        for key, tensor in there.items():
            here[key] = tensor.to(lane.device, copy=True)
    lane.turn = lane.turn._replace(step=step)
