"""The last resort of the watchdog: ends this process although no Python code can run any more.

A C function that never returns and keeps Python's global lock (the GIL) stops every Python thread, so what acts then
must not be Python. A POSIX timer of glibc (SIGEV_THREAD) calls a C function in a thread that glibc starts for it, and
glibc's `makecontext` strings C functions together without a compiler. Two timers, set alike:

    usleep(grace) -> sem_wait(gate) -> write(where this rank stood) -> raise(SIGUSR2) -> _exit(code)
    usleep(1.5 x grace) -> sem_wait(gate) -> _exit(code)

The watchdog has given SIGUSR2 to faulthandler, which writes the stacks of all threads without the GIL. The second
timer is for a file system or a terminal that does not take what the first one writes.

Why a grace and a gate: the clock of a timer goes on while the process is stopped (SIGSTOP, a scheduler's suspend), so
after a long stop it fires the moment the process goes on. The grace is counted from there, and within it the watchdog's
thread, which runs again, sets the timers anew and closes the old gates. Who waits at a closed gate waits for ever: two
sleeping threads for each such stop. glibc keeps one more for its timers until the process ends.

For Linux with glibc on x86_64 and aarch64. Elsewhere faulthandler's own timer does it: then the exit code is 1, and
a long stop may end the process.
"""

import ctypes
import faulthandler
import mmap
import platform
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

PLACE_BYTES = 64
_CONTEXT_BYTES = 8192  # room for one ucontext_t: 968 on x86_64, 4560 on aarch64
_STACK_BYTES = 120 * 1024  # a signal frame with its vector registers and faulthandler's buffers fit many times
_CLOCK_MONOTONIC, _SIGEV_THREAD = 1, 2

_withdrawn: list["_Fuse"] = []  # their memory is in use by threads at closed gates


class DeadMan(Protocol):
    """Ends the process unless it is set anew in time."""

    def set(self, seconds: float) -> None:
        """The end is in `seconds` plus the grace."""

    def note(self, place: str) -> None:
        """Where the process stands, to be said at the end. Cheap."""

    def close(self) -> None: ...


def make_dead_man(exit_code: int, grace_s: float, file: int, text: str) -> DeadMan:
    """Not set yet. At the end `text` and the place go to the descriptor `file` and to standard error, the stacks to
    wherever faulthandler has registered SIGUSR2, which must be so until the dead man is closed."""
    glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
    if glibc and platform.machine() in ("x86_64", "aarch64"):
        with suppress(OSError, AttributeError):  # a sandbox without timers, a libc without a function
            return GlibcDeadMan(exit_code, grace_s, file, text)
    return FaulthandlerDeadMan(grace_s, file)


class FaulthandlerDeadMan:
    def __init__(self, grace_s: float, file: int):
        self._grace_s, self._file = grace_s, file

    def set(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds + self._grace_s, exit=True, file=self._file)

    def note(self, place: str) -> None:
        """Nobody could say it: faulthandler writes stacks only."""

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()


class GlibcDeadMan:
    def __init__(self, exit_code: int, grace_s: float, file: int, text: str):
        self._lock = threading.Lock()  # the main thread and the watchdog's set it
        self._closed = False
        said = text.encode(errors="replace")
        self._text = ctypes.create_string_buffer(said + b" " * PLACE_BYTES + b"\n")
        self._place = memoryview(self._text).cast("B")[len(said) : len(said) + PLACE_BYTES]
        line = (ctypes.addressof(self._text), len(said) + PLACE_BYTES + 1)
        # The file first: standard error may be a terminal that somebody holds.
        tell: list[_Call] = [("write", (file, *line)), ("raise", (signal.SIGUSR2,)), ("write", (2, *line))]
        end: list[_Call] = [("_exit", (exit_code,))]
        self._plans = [(grace_s, [*tell, *end]), (1.5 * grace_s, end)]
        self._fuses = [_Fuse(delay_s, calls) for delay_s, calls in self._plans]

    def set(self, seconds: float) -> None:
        with self._lock:
            if self._closed:
                return
            for number, fuse in enumerate(self._fuses):
                if not fuse.set(seconds):
                    fuse.withdraw()
                    self._fuses[number] = _Fuse(*self._plans[number])
                    self._fuses[number].set(seconds)

    def note(self, place: str) -> None:
        # As long as its room whatever is said, because C writes all of it.
        self._place[:] = place.encode(errors="replace")[:PLACE_BYTES].ljust(PLACE_BYTES)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for fuse in self._fuses:
                fuse.withdraw()


_Call = tuple[str, tuple[int, ...]]


class _Fuse:
    """A timer that calls C functions one after the other, `delay_s` after it fired and while its gate is open."""

    def __init__(self, delay_s: float, calls: Sequence[_Call]):
        # PyDLL keeps the GIL: nothing here takes long, and whoever lets go of it may not get it back in time.
        self._libc = libc = ctypes.PyDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        self._set = self._fired = False
        self._gate = (ctypes.c_char * 64)()  # a sem_t has 32 bytes
        _check(libc.sem_init(self._gate, 0, 1), "sem_init")
        wait = ("usleep", (round(delay_s * 1e6),)), ("sem_wait", (ctypes.addressof(self._gate),))
        first = self._chain([*wait, *calls])
        notify = ctypes.cast(libc.setcontext, ctypes.c_void_p)
        event = _Sigevent(sigev_value=first, sigev_notify=_SIGEV_THREAD, sigev_notify_function=notify)
        _check(libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)), "timer_create")

    def set(self, seconds: float) -> bool:
        """Whether that was in time: it has not fired yet."""
        self._settime(max(1, round(seconds * 1e9)))
        self._set = True
        return not self._fired

    def withdraw(self) -> None:
        """It does nothing any more, whether it has fired or not."""
        self._settime(0)
        self._libc.timer_delete(self._timer)
        if self._fired:
            self._libc.sem_trywait(self._gate)
            _withdrawn.append(self)

    def _settime(self, nanoseconds: int) -> None:
        wanted, before = _Itimerspec(it_value=_Timespec(*divmod(nanoseconds, 10**9))), _Itimerspec()
        code = self._libc.timer_settime(self._timer, 0, ctypes.byref(wanted), ctypes.byref(before))
        _check(code, "timer_settime")
        ticking = before.it_value.tv_sec or before.it_value.tv_nsec
        self._fired = self._fired or (self._set and not ticking)

    def _chain(self, calls: Sequence[_Call]) -> int:
        """The address of a context from which `setcontext` makes all of the calls; the last must not return."""
        self._memory = mmap.mmap(-1, len(calls) * (_CONTEXT_BYTES + _STACK_BYTES))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        following = None
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            for number in reversed(range(len(calls))):
                name, arguments = calls[number]
                # A context has its own mask. Signals from outside would cut a wait short, even that at a closed gate.
                opened = {signal.SIGUSR2} if name == "raise" else set()
                signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals() - opened)
                context = base + number * _CONTEXT_BYTES
                _check(self._libc.getcontext(ctypes.c_void_p(context)), "getcontext")
                head = _ContextHead.from_address(context)
                head.uc_link = following
                head.ss_sp = base + len(calls) * _CONTEXT_BYTES + number * _STACK_BYTES
                head.ss_size = _STACK_BYTES
                values = [ctypes.c_long(value) for value in arguments]
                self._libc.makecontext(ctypes.c_void_p(context), getattr(self._libc, name), len(values), *values)
                following = context
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return base


def _check(code: Any, name: str) -> None:
    if code:
        raise OSError(ctypes.get_errno(), name)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class _Sigevent(ctypes.Structure):
    """As on every 64-bit Linux: 64 bytes, of which the first 32 say what to call in a thread."""

    _fields_ = (
        ("sigev_value", ctypes.c_void_p),
        ("sigev_signo", ctypes.c_int),
        ("sigev_notify", ctypes.c_int),
        ("sigev_notify_function", ctypes.c_void_p),
        ("sigev_notify_attributes", ctypes.c_void_p),
        ("reserved", ctypes.c_int * 8),
    )


class _ContextHead(ctypes.Structure):
    """The beginning of ucontext_t, the same on both machines."""

    _fields_ = (
        ("uc_flags", ctypes.c_ulong),
        ("uc_link", ctypes.c_void_p),
        ("ss_sp", ctypes.c_void_p),
        ("ss_flags", ctypes.c_int),
        ("ss_size", ctypes.c_size_t),
    )
