"""What encoding and decoding cost on one device, beside the least that memory traffic allows.

The floor of a step with error feedback is reading gradient and residual and writing the residual,
12 bytes an element, and writing the message, at the speed of a copy measured in the same run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from laconic import kernels
from laconic.bench.records import KernelRecord, append, machine_facts
from laconic.bench.stopwatch import Stopwatch, stopwatch
from laconic.bench.summary import kernel_summary
from laconic.bench.tables import kernel_tables
from laconic.contract import Compressor, ManyRounds, OneRound, take
from laconic.errors import ConfigError
from laconic.spec import compressor_classes, format_spec, name_of, parse
from laconic.types import Gather, Given, Mean, State, Turn

MESSAGES = 8
"""How many gathered messages are decoded and added at once."""


def usual_specs() -> list[str]:
    """Every method of the folder in its usual setting."""
    return [format_spec(cls(**cls.examples[0])) for cls in compressor_classes().values()]


@dataclass(frozen=True)
class KernelBench:
    """Every method at every size, on one device."""

    device: str
    sizes: tuple[int, ...]
    specs: tuple[str, ...]
    threads: int
    json_path: Path | None
    command: str

    def run(self, console: Console) -> None:
        """Measures, shows the table, and adds the records to the file as they come."""
        device = _device(self.device)
        torch.set_num_threads(self.threads)
        watch = stopwatch(device)
        records: list[KernelRecord] = []
        for numel in self.sizes:
            copy_bytes_per_us = _copy_speed(numel, device, watch)
            for spec in self.specs:
                console.print(f"{spec}, {numel:,} elements", markup=False, highlight=False)
                record = self._measure(parse(spec), numel, device, watch, copy_bytes_per_us)
                records.append(record)
                if self.json_path is not None:
                    append(self.json_path, record)
        for table in kernel_tables(records):
            console.print(table)
        console.print(kernel_summary(records), markup=False, highlight=False)

    def _measure(
        self,
        compressor: Compressor,
        numel: int,
        device: torch.device,
        watch: Stopwatch,
        copy_bytes_per_us: float,
    ) -> KernelRecord:
        rows = max(1, int(numel**0.5))
        x = torch.randn(rows, numel // rows, device=device) * 1e-3
        turn = Turn(tuple(x.shape), size=MESSAGES)
        payload = compressor.encode(x, turn)
        out = torch.zeros(x.numel(), device=device)
        decode8_us = None
        if isinstance(compressor, OneRound):
            said = [payload.parts] * MESSAGES
            decode8_us = watch.median_us(lambda: compressor.add_to(out, said, 0.125, turn))
        ef_step_us = watch.median_us(_ef_step(compressor, x, turn))
        floor_us = (12 * x.numel() + payload.nbytes) / copy_bytes_per_us
        return KernelRecord(
            method=name_of(compressor),
            spec=format_spec(compressor),
            device=_device_name(device),
            backend=kernels.chosen(device),
            numel=x.numel(),
            encode_us=watch.median_us(lambda: compressor.encode(x, turn)),
            decode_us=watch.median_us(lambda: compressor.decode(payload)),
            decode8_us=decode8_us,
            ef_step_us=ef_step_us,
            payload_bytes=payload.nbytes,
            bits_per_element=8 * payload.nbytes / x.numel(),
            floor_us=floor_us,
            ratio_to_floor=ef_step_us / floor_us,
            command=self.command,
            machine=machine_facts(),
        )


def _ef_step(compressor: Compressor, x: Tensor, turn: Turn) -> Callable[[], object]:
    """Gradient and residual in, message and new residual out; without one where it is illegal."""
    grad = x.view(-1)
    residual = torch.zeros_like(grad) if compressor.traits().contraction else None
    given = Given(grad, residual, residual)
    if isinstance(compressor, OneRound):
        return lambda: take(compressor, given, turn)
    assert isinstance(compressor, ManyRounds)
    state = compressor.state(turn._replace(size=1), x.device)
    return lambda: _alone(compressor, given, state, turn._replace(size=1))


def _alone(method: ManyRounds, given: Given, state: State, turn: Turn) -> None:
    """A conversation in a world of one, where every answer is what was said."""
    talk = method.rounds(given, state, turn)
    try:
        request = next(talk)
        while True:
            assert isinstance(request, Mean | Gather)
            request = talk.send([request.parts])
    except StopIteration:
        return


def _copy_speed(numel: int, device: torch.device, watch: Stopwatch) -> float:
    """Bytes read and written per microsecond by a copy of so many float32."""
    source = torch.zeros(numel, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / watch.median_us(lambda: target.copy_(source))


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"bench kernels: device must be cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("bench kernels: device 'cuda' asked for, but torch sees no GPU here")
    return torch.device(name)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
