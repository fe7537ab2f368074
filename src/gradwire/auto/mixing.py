"""Chooses a method for each group of parameters, from the calibrations of single methods.

Costs of groups add up, except that groups with the same exchange share their rounds. The sweep over
groups is that of Autopilot over layers, with methods in place of settings.
"""

from collections.abc import Sequence

from gradwire.auto.calibration import Calibration
from gradwire.auto.candidates import Candidate
from gradwire.auto.step_model import ExchangeLoad, StepModel
from gradwire.comm.cost_model import LinkModel
from gradwire.control._autopilot.allocation import Option, best_allocation

MIXED_WORTH = 1.03
"""The smallest predicted speedup over all single methods that is worth mixing them."""
SPARED = 0.03
"""Time, as a share of a step, that may be spent on a smaller error."""


def allocate(
    calibrated: Sequence[Sequence[Calibration]],
    admitted: Sequence[Sequence[int]],
    model: StepModel,
    link: LinkModel,
) -> list[int]:
    """Returns the method of each group, for the shortest step.

    `calibrated` are the calibrations by method and group, `admitted` the methods by group. The
    first method has no error. Of allocations whose steps are about equal, that of least error.
    """
    found = []
    for codec_share, wire_share in model.shares():
        layers: list[list[Option]] = []
        for group, methods in enumerate(admitted):
            parts = [(index, calibrated[index][group]) for index in methods]
            wires_s = [part.load().wire_s(link, model.buckets) for _, part in parts]
            layers.append(
                [
                    Option(
                        index,
                        codec_share * part.codec_s + wire_share * wire_s,
                        max(0.0, part.error) if index else 0.0,
                    )
                    for (index, part), wire_s in zip(parts, wires_s, strict=True)
                ]
            )
        found.append(_cheapest(layers, model.compute_s))
    return min(found, key=lambda indices: _step_s(indices, calibrated, model, link))


def _cheapest(layers: Sequence[Sequence[Option]], compute_s: float) -> list[int]:
    """Returns the cheapest allocation, or one of less error that costs about as much."""
    least_s = sum(min(option.cost_s for option in options) for options in layers)
    bound_s = least_s + SPARED * (compute_s + least_s)
    return best_allocation(layers, lambda cost_s, _: max(cost_s, bound_s)).indices


def _step_s(
    indices: Sequence[int],
    calibrated: Sequence[Sequence[Calibration]],
    model: StepModel,
    link: LinkModel,
) -> float:
    loads = [calibrated[index][group].load() for group, index in enumerate(indices)]
    total = ExchangeLoad(
        sum(load.codec_s for load in loads),
        max(load.hops for load in loads),
        sum(load.link_bytes for load in loads),
    )
    return model.step_s(total, link)


def total_load(option: Candidate, parts: Sequence[Calibration]) -> ExchangeLoad:
    """Returns the load of a candidate from those of its groups."""
    exchanges = [exchange for _, exchange in option.choice] * (1 if option.is_mixed else len(parts))
    hops: dict[str, float] = {}
    for exchange, part in zip(exchanges, parts, strict=True):
        # Rounds of one kind are shared; those of different kinds wait for one another.
        hops[exchange] = max(hops.get(exchange, 0.0), part.hops)
    return ExchangeLoad(
        sum(part.codec_s for part in parts),
        sum(hops.values()),
        sum(part.link_bytes for part in parts),
    )
