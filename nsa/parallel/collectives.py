"""Small collectives. All ranks call each function together."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from nsa.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FirstRankFailedError,
    LaunchError,
    NSAError,
    RankLostError,
)
from nsa.parallel.world import World

T = TypeVar("T")


def sum_over_ranks(values: Tensor, world: World) -> Tensor:
    """All-reduces the values in place."""
    if world.size > 1:
        dist.all_reduce(values)
    return values


def gather_objects(value: T, world: World) -> list[T]:
    """The values of all ranks, in order."""
    found = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(found, value, group=world.cpu_group)
    return found


def on_first_rank(world: World, function: Callable[[], T]) -> T:
    """Calls `function` on rank 0 only, and returns its result or raises its error on every rank."""
    if world.size == 1:
        return function()
    answer: list[Any] = [None]
    failure: Exception | None = None
    if world.is_first:
        try:
            answer = [(None, function())]
        except Exception as error:
            failure = error
            answer = [((getattr(error, "exit_code", None), str(error)), None)]
    dist.broadcast_object_list(answer, src=0, group=world.cpu_group)
    if failure is not None:
        raise failure
    failed, value = answer[0]
    if failed is not None:
        code, text = failed
        kind = next((k for k in (ConfigError, DataError, CheckpointError, LaunchError) if k.exit_code == code), None)
        raise FirstRankFailedError(f"rank 0 failed: {text}") if kind is None else kind(text)
    return value  # type: ignore[no-any-return]


_LOST = ("gloo", "nccl", "connection reset by peer", "connection closed by peer")


def lost_rank(reason: BaseException | str, rank: int, size: int) -> RankLostError | None:
    """A RankLostError if the failure looks like the loss of another rank; None if this process itself failed."""
    text = str(reason).strip()
    said = re.sub(r"'[^']*'", "", text).lower()  # without paths
    is_network = isinstance(reason, str | RuntimeError) and any(word in said for word in _LOST)
    if size == 1 or isinstance(reason, NSAError) or not (is_network or isinstance(reason, dist.DistError)):
        return None
    first = text.splitlines()[0] if text else type(reason).__name__
    return RankLostError(
        f"rank {rank}: another rank is gone or does not answer ({first}); the end of its log has the reason. "
        "The same command resumes from the last checkpoint"
    )
