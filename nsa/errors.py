"""Every error that a user can meet, with its exit code, and escaping for text that may come from outside.

A message says what was wrong, where, and what to do about it. Assertions state what cannot happen.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import index
from typing import SupportsIndex

# Control characters other than tab and line feed, marks that reverse the direction of text, and lone surrogates, which
# cannot be encoded (Python puts them into a file name that is not valid UTF-8).
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")


def printable(text: object) -> str:
    r"""Returns the text with control characters escaped, such as \x1b. Text that may come from data, a file, a server
    or a model passes through this function before it is printed, so that it cannot control the terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


class NSAError(Exception):
    """Base of all errors raised on purpose; the command line prints it without a traceback. Its text is printable."""

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


@contextmanager
def reworded(
    kind: type[NSAError], what: str, remedy: str = "", caught: type[Exception] | tuple[type[Exception], ...] = OSError
) -> Iterator[None]:
    """Replaces an error of type `caught` by a `kind` with the message `what: reason; remedy`."""
    try:
        yield
    except caught as error:
        reason = getattr(error, "strerror", None) or error
        raise kind(f"{what}: {reason}" + (f"; {remedy}" if remedy else "")) from None


class ConfigError(NSAError):
    """A configuration, an override or a command line that cannot be run."""

    exit_code = 2


class DataError(NSAError):
    """A corpus, a tokenizer or a data file that cannot be used."""

    exit_code = 3


class DataUnavailableError(DataError):
    """A source that does not answer: a hub that cannot be reached, a deadline that passed."""


class CheckpointError(NSAError):
    """Saved weights or state that cannot be written or read."""

    exit_code = 4


class NumericsError(NSAError):
    """A NaN or an infinity in the loss or the gradients."""

    exit_code = 5


class HangError(NSAError):
    """The run made no progress for too long. The watchdog ends the process and writes this name into metrics.json."""

    exit_code = 6


class LaunchError(NSAError):
    """Processes, devices or folders that do not fit the configuration."""

    exit_code = 7


class RankLostError(NSAError):
    """Another process of the run ended or does not answer."""

    exit_code = 8


class FirstRankFailedError(RankLostError):
    """Rank 0 failed, and records why."""


class OutOfMemoryError(NSAError):
    """A GPU or the host has no memory left for the run."""

    exit_code = 9


class Preempted(NSAError):  # noqa: N818  (not a failure: the run saved and stopped on request)
    """The run stopped at a signal and saved a checkpoint; the same command resumes it."""

    exit_code = 75


class Interrupted(Preempted):
    """The run stopped at Ctrl-C and saved a checkpoint; the same command resumes it."""

    exit_code = 130


class SpecError(NSAError, ValueError):
    """An attention geometry that breaks a rule. `field` is the name of the invalid size."""

    exit_code = 2

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field
        self.rule = message


class ArgumentError(NSAError, ValueError):
    """A function was called with an invalid argument. `argument` is its name."""

    def __init__(self, argument: str, message: str):
        super().__init__(f"{argument}: {message}")
        self.argument = argument


def whole_number(argument: str, value: SupportsIndex, least: int = 1, most: int | None = None) -> int:
    """Converts an argument of any integer type, such as numpy's, to int and checks its bounds."""
    try:
        number = index(value)
    except TypeError:
        raise ArgumentError(argument, f"must be a whole number, got {value!r}") from None
    if number < least:
        raise ArgumentError(argument, f"must be at least {least}, got {number}")
    if most is not None and number > most:
        raise ArgumentError(argument, f"must be at most {most}, got {number}")
    return number


def whole_numbers(
    argument: str, value: SupportsIndex | Iterable[SupportsIndex], count: int, least: int = 0, most: int | None = None
) -> list[int]:
    """Converts an argument, one number or a list of numbers, to a list. One number is repeated `count` times."""
    try:
        given = [index(value)] * count  # type: ignore[arg-type]
    except TypeError:
        try:
            given = list(value)  # type: ignore[arg-type]
        except TypeError:
            raise ArgumentError(argument, f"must be a whole number or a list of them, got {value!r}") from None
    return [whole_number(argument, number, least, most) for number in given]


class CacheFullError(NSAError, RuntimeError):
    """A cache for decoding has no room for more tokens or sequences."""


class DerivativeError(NSAError, NotImplementedError):
    """A second derivative, a forward-mode derivative or a derivative inside `torch.func` was requested. `operator` is
    the operator that lacks it."""

    def __init__(self, operator: str, *, is_forward_mode: bool = False, is_transform: bool = False):
        problem = (
            "has a first derivative only; its backward cannot be differentiated. Use gradients made with "
            "create_graph=True as constants (.detach()), or take a Hessian-vector product from the difference of two "
            "gradients: (grad(x + h*v) - grad(x - h*v)) / 2h"
        )
        if is_forward_mode:
            problem = (
                "has no forward-mode derivative (torch.func.jvp, jacfwd, hessian; forward_ad). Use .backward() or "
                "torch.autograd.grad, or take the difference of two values: (f(x + h*v) - f(x - h*v)) / 2h"
            )
        elif is_transform:
            problem = (
                "has no derivative inside torch.func (grad, vjp, jacrev), where PyTorch does not support custom "
                "operators. Use .backward() or torch.autograd.grad; for gradients per sample, call it for each sample"
            )
        super().__init__(f"{operator}: {problem}")
        self.operator = operator


class BackendError(NSAError, RuntimeError):
    """A backend was requested by name and cannot run on this machine; the message says why."""
