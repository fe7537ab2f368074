"""`gradwire bench kernels`: the cost of encoding and decoding beside the memory-traffic floor.

The time of every method at every size is limited. A method that cannot encode once in that time, as
smaller sizes predict, is left out.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from gradwire import kernels
from gradwire.base import Compressor
from gradwire.bench import human
from gradwire.bench.machine import check_device, device_name, machine_facts
from gradwire.bench.microbench.measure import (
    MESSAGES,
    MemoryBaseline,
    Stopwatch,
    TimeLimit,
    check_setting,
    measure,
    measure_baseline,
    over_limit,
    stopwatch,
)
from gradwire.bench.microbench.probe import predicted_s
from gradwire.bench.records.compare import group, kernel_setting
from gradwire.bench.records.files import append, check_writable
from gradwire.bench.records.schema import KernelRecord
from gradwire.bench.report.figures import check_svg_name, write_svg
from gradwire.bench.report.plots import plots
from gradwire.bench.report.summary import kernel_summary
from gradwire.bench.report.tables import kernel_tables
from gradwire.bench.time_left import TimeLeft
from gradwire.errors import ConfigError
from gradwire.spec import compressor_classes, format_spec, name_of, parse
from gradwire.types import EncodeContext

NAN = float("nan")
LIMIT_S = 30.0
_PROBE_CALLS = 3
_SHORT_S = 0.05


def usual_specs() -> list[str]:
    """Returns every method of the catalogue in its first example setting."""
    return [format_spec(cls(**cls.examples[0])) for cls in compressor_classes().values()]


@dataclass(frozen=True)
class KernelBench:
    """Measures every method at every size, on one device."""

    device: str
    sizes: tuple[int, ...]
    specs: tuple[str, ...]
    threads: int
    json_path: Path | None
    command: str
    plot_path: Path | None = None
    commit: str | None = None
    limit_s: float = LIMIT_S

    def run(self, console: Console) -> None:
        """Measures, shows the table, and adds the records to the file as they come."""
        check_device(self.device)
        device = torch.device(self.device)
        if not self.limit_s > 0:
            raise ConfigError(f"kernels: seconds must be positive, got {self.limit_s}")
        if self.plot_path is not None:
            check_svg_name(self.plot_path)
        compressors = [parse(spec) for spec in self.specs]
        check_setting(self.sizes, self.threads, device)
        if self.json_path is not None:
            check_writable(self.json_path)
        torch.set_num_threads(self.threads)
        watch = stopwatch(device)
        records: list[KernelRecord] = []
        time_left, total = TimeLeft(), len(self.sizes) * len(compressors)
        for numel in self.sizes:
            baseline = measure_baseline(numel, device, watch)
            for compressor in compressors:
                spec = format_spec(compressor)
                left = time_left.words(len(records), total)
                console.print(f"{spec}, {numel:,} elements{left}", markup=False, highlight=False)
                records.append(self._record(compressor, numel, device, watch, baseline))
                if self.json_path is not None:
                    append(self.json_path, records[-1])
        self._show(records, console)

    def _show(self, records: list[KernelRecord], console: Console) -> None:
        for table in kernel_tables(records):
            console.print(table)
        console.print(kernel_summary(records), markup=False, highlight=False)
        if self.plot_path is not None:
            groups = group(records, kernel_setting)
            write_svg(
                self.plot_path,
                [(s.words(), plot) for s, rows in groups.items() for plot in plots(rows)],
            )

    def _record(
        self,
        compressor: Compressor,
        numel: int,
        device: torch.device,
        watch: Stopwatch,
        baseline: MemoryBaseline,
    ) -> KernelRecord:
        """Returns the measured record, or one with the error, so that the run continues."""
        rows = max(1, int(numel**0.5))
        machine = machine_facts()
        blank = KernelRecord(
            method=name_of(compressor),
            spec=format_spec(compressor),
            device=device_name(self.device),
            backend=kernels.backend_for(device),
            numel=rows * (numel // rows),
            encode_us=NAN,
            decode_us=NAN,
            decode8_us=None,
            ef_step_us=NAN,
            payload_bytes=0,
            bits_per_element=NAN,
            floor_us=NAN,
            ratio_to_floor=NAN,
            threads=self.threads,
            command=self.command,
            machine=machine | ({"commit": self.commit} if self.commit else {}),
            contraction=compressor.traits().contraction,
        )
        try:
            expected_s = predicted_s(
                numel, lambda size: _encode_s(compressor, size, device, watch), self.limit_s
            )
            if expected_s > self.limit_s:
                why = f"one encode would take about {human.duration_s(expected_s)}"
                return over_limit(blank, self.limit_s, why)
            x = _gradient(numel, device)
            return measure(compressor, x, watch, baseline, blank, TimeLimit(self.limit_s))
        except RuntimeError as error:
            # Such as too little memory for this method at this size.
            return replace(blank, status="failed", error=str(error).splitlines()[0])


def _gradient(numel: int, device: torch.device) -> Tensor:
    """Returns a random matrix, as square as possible."""
    rows = max(1, int(numel**0.5))
    return torch.randn(rows, numel // rows, device=device) * 1e-3


def _encode_s(compressor: Compressor, numel: int, device: torch.device, watch: Stopwatch) -> float:
    """Returns the seconds of one encode, the best of a few calls if it is short."""
    x = _gradient(numel, device)
    ctx = EncodeContext(tuple(x.shape), world_size=MESSAGES)
    # The first call may compile.
    compressor.encode(x, ctx)
    best_s = float("inf")
    for _ in range(_PROBE_CALLS):
        best_s = min(best_s, watch.time_us(lambda: compressor.encode(x, ctx), 1) / 1e6)
        if best_s > _SHORT_S:
            break
    return best_s
