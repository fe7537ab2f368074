"""How much less a method with two compressors says than dense steps do."""

from laconic.lanes import Lanes


def message_ratio(*lanes: Lanes) -> float:
    """Bytes of all parameters over those of one worker's messages about them."""
    ways = [lane for one in lanes for lane in one.lanes.values()]
    said = sum(lane.compressor.nbytes(lane.turn.shape) for lane in ways)
    return sum(t.nbytes for one in lanes for t in one.tensors.values()) / max(1, said)


def overall_ratio(updates: float | None, errors: float, sync_every: int) -> float:
    """R of 1/R = 1/R_updates + 1/(R_errors H); None says nothing of updates."""
    return 1 / ((1 / updates if updates is not None else 0.0) + 1 / (errors * sync_every))
