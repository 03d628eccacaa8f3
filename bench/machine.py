"""The machine under the figures: whether it is idle. What it can do at best, `fusec.debug.measurement` measures."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

BUSY = 0.10
"""Share of the machine that others may use. A preempted thread holds up every parallel loop, so a little costs much."""


@dataclass
class Watch:
    """How busy other processes keep the machine, since it was made."""

    total: float
    busy: float
    own: float

    @classmethod
    def start(cls) -> "Watch":
        """Begin to look."""
        return cls(*_times(), _own_seconds())

    def others(self) -> float:
        """Share of all cores' time that others used."""
        total, busy = _times()
        passed = max(total - self.total, 1e-9)
        return max(0.0, (busy - self.busy - (_own_seconds() - self.own)) / passed)


def wait_until_idle(allow_busy: bool = False, patience: float = 60.0) -> float:
    """Look for half a second at a time until others leave the machine alone; gives their share.

    Raises:
        SystemExit: when they do not within ``patience`` seconds; a figure taken beside them would mean nothing.
    """
    deadline = time.monotonic() + patience
    while True:
        watch = Watch.start()
        time.sleep(0.5)
        share = watch.others()
        if share <= BUSY:
            return share
        if allow_busy:
            warning = f"*** THE MACHINE IS BUSY ({share:.0%}): these times mean nothing; results are marked so. ***"
            print(warning, file=sys.stderr)
            return share
        if time.monotonic() > deadline:
            raise SystemExit(
                f"other processes use {share:.0%} of the machine, and did so for {patience:.0f} s\n"
                f"  why:   beside another process a small matrix product can take 60 times as long\n"
                f"  fix:   stop them, or give --allow-busy to see that the command runs"
            )


def _times() -> tuple[float, float]:
    """Seconds of all cores since the machine started, and those in which they worked."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:  # not Linux: the load average has to do
        now = time.monotonic() * (os.cpu_count() or 1)
        return now, now * min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    ticks = [int(word) for word in first]
    idle = ticks[3] + ticks[4]
    rate = os.sysconf("SC_CLK_TCK")
    return sum(ticks) / rate, (sum(ticks) - idle) / rate


def _own_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
