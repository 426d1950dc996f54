"""Fault injection: named points at which a test can kill, stop or starve a process.

While no fault is armed, a point costs one check of a module variable. `arm` parses comma-separated faults such as
`save.rename:kill`, `save.shard:enospc:hit=2:rank=1` or `step.loss:nan:hit=5`. The second example raises ENOSPC when
rank 1 reaches `save.shard` for the second time. `nsa train` arms the faults in NSA_FAULTS.
"""

import errno
import os
import signal
import time
from dataclasses import dataclass, field, fields

from nsa.errors import ConfigError

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM, "usr1": signal.SIGUSR1}
DISK_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}
ACTIONS = (*SIGNALS, *DISK_ERRORS, "raise", "sleep", "nan", "barrier")


@dataclass
class Fault:
    """Triggers when the process reaches `point` for the `hit`th time, `times` times in a row."""

    point: str
    action: str
    hit: int = 1
    times: int = 1
    rank: int = -1  # every rank
    attempt: int = -1  # every attempt of torchrun
    seconds: int = 3600  # duration of the action `sleep`
    seen: int = field(default=0, init=False)

    def due(self) -> bool:
        self.seen += 1
        return self.hit <= self.seen < self.hit + self.times


_armed: list[Fault] = []


def arm(text: str, rank: int = 0, attempt: int = 0) -> None:
    """Replaces the armed faults by the faults in `text` for this rank and attempt; an empty text disarms all."""
    faults = [_parse(part) for part in text.split(",") if part.strip()]
    _armed[:] = [f for f in faults if f.rank in (-1, rank) and f.attempt in (-1, attempt)]


def armed() -> bool:
    """Whether any fault is armed in this process."""
    return bool(_armed)


def point(name: str) -> None:
    """Triggers the faults that are armed for this point."""
    for fault in _armed:
        if fault.point == name and fault.action != "nan" and fault.due():
            _trigger(fault)


def makes_nan(name: str) -> bool:
    """Whether an armed fault replaces the value computed at this point by a NaN."""
    return bool(_armed) and any(f.point == name and f.action == "nan" and f.due() for f in _armed)


def _trigger(fault: Fault) -> None:
    if fault.action in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault.action])
    elif fault.action in DISK_ERRORS:
        raise OSError(DISK_ERRORS[fault.action], os.strerror(DISK_ERRORS[fault.action]))
    elif fault.action == "sleep":
        time.sleep(fault.seconds)
    elif fault.action == "barrier":  # a collective that the other ranks do not call
        from torch import distributed

        distributed.barrier()
    else:
        raise RuntimeError(f"fault at {fault.point}")


def _parse(text: str) -> Fault:
    name, *rest = text.strip().split(":")
    try:
        action, *settings = rest
        if action not in ACTIONS:
            raise ValueError
        return Fault(name, action, **{key: int(value) for key, value in (s.split("=") for s in settings)})
    except (ValueError, TypeError):  # TypeError: an unknown setting
        numbers = [f.name for f in fields(Fault) if f.init and f.type is int]
        raise ConfigError(
            f"NSA_FAULTS: cannot read {text!r}; write POINT:ACTION[:SETTING=N]..., where an action is one of "
            f"{', '.join(ACTIONS)} and a setting one of {', '.join(numbers)}"
        ) from None
