"""The kinds of records that are no runs of a benchmark's cases."""

from collections.abc import Mapping
from typing import TypeAlias

from laconic.bench.records.chaos import ChaosRecord, KillRecord
from laconic.bench.records.follow import FollowRecord
from laconic.bench.records.forecasts import ForecastRecord
from laconic.bench.records.fuzz import FuzzRecord
from laconic.bench.records.guards import GuardRecord
from laconic.bench.records.keras import KerasRecord
from laconic.bench.records.levels import LevelsRecord

OtherRecord: TypeAlias = (
    ForecastRecord
    | LevelsRecord
    | FollowRecord
    | KerasRecord
    | GuardRecord
    | FuzzRecord
    | ChaosRecord
    | KillRecord
)
FORECAST = "forecast"
OTHERS: Mapping[str, type[OtherRecord]] = {
    FORECAST: ForecastRecord,
    "levels": LevelsRecord,
    "follow": FollowRecord,
    "keras": KerasRecord,
    "guard": GuardRecord,
    "fuzz": FuzzRecord,
    "chaos": ChaosRecord,
    "kill": KillRecord,
}
UNVERSIONED = ("follow", "chaos", "kill")
"""Kinds whose first records did not say their version, which was 1."""
