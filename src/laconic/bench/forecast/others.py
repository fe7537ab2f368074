"""What other programs do on this machine while we measure."""

import os
from pathlib import Path
from time import perf_counter, process_time

_STAT = Path("/proc/stat")
_IDLE, _WAITING = 3, 4


class Others:
    """Cores that programs other than ours have used since this was made."""

    def __init__(self) -> None:
        self._start = _busy_s(), process_time(), perf_counter()

    def since(self) -> tuple[float, float, float]:
        """Seconds that all programs, this process, and the clock have spent."""
        busy_s, own_s, now_s = self._start
        return _busy_s() - busy_s, process_time() - own_s, perf_counter() - now_s


def others_cores(busy_s: float, ours_s: float, passed_s: float) -> float:
    """Of what all cores did, what was not ours."""
    return max(0.0, busy_s - ours_s) / passed_s


def _busy_s() -> float:
    """What all cores have done since the machine started; 0 where nobody counts it."""
    if not _STAT.exists():
        return 0.0
    # user nice system idle iowait irq softirq steal, and guest, which user includes
    ticks = [int(word) for word in _STAT.read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[_IDLE] - ticks[_WAITING]) / os.sysconf("SC_CLK_TCK")
