"""Peak memory of this process, on a GPU by its allocator, else by the kernel's high-water mark.

Freed memory has to go back to the kernel at once for the mark to mean anything: start the process
with `PeakMemory.environment()`, which makes every large tensor a mapping of its own.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Measures from its creation on.

    Attributes:
        baseline: Bytes in use when it was made.
    """

    def __init__(self) -> None:
        self._is_cuda = torch.cuda.is_available()
        self.baseline = 0.0 if self._is_cuda else _status("VmRSS")

    @staticmethod
    def environment() -> dict[str, str]:
        """Environment of a process whose memory is to be measured."""
        return {
            **os.environ,
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "0",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }

    def restart(self) -> None:
        """Forget the peak so far."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            _CLEAR.write_text("5")  # resets the high-water mark (proc_pid_clear_refs(5))

    def peak(self) -> float:
        """Most bytes in use since the last restart, above the baseline."""
        if self._is_cuda:
            return float(torch.cuda.max_memory_allocated())
        return _status("VmHWM") - self.baseline


def _status(name: str) -> float:
    match = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"{_STATUS} says nothing of {name}; peak memory is measured on Linux only")
    return float(match[1]) * 1024
