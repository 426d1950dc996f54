"""Small agreements between processes. Whoever calls one of these, all ranks call it."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from nsa.errors import NSAError, RankLostError
from nsa.parallel.launch import World

T = TypeVar("T")


def sum_over_ranks(values: Tensor, world: World) -> Tensor:
    """The sum, in place, on every rank."""
    if world.size > 1:
        dist.all_reduce(values)
    return values


def on_first_rank(world: World, function: Callable[[], T]) -> T:
    """What `function` returns or raises on rank 0, returned or raised on every rank. The others do not call it."""
    if world.size == 1:
        return function()
    answer: list[tuple[bool, object]] = [(False, None)]
    if world.is_first:
        try:
            answer = [(True, function())]
        except NSAError as error:
            answer = [(False, error)]
    dist.broadcast_object_list(answer, src=0, group=world.cpu_group)
    succeeded, value = answer[0]
    if not succeeded:
        assert isinstance(value, NSAError)
        raise value
    return value  # type: ignore[return-value]


def gather(value: T, world: World) -> list[T]:
    """Everybody's value, by rank, on every rank."""
    if world.size == 1:
        return [value]
    values: list[T | None] = [None] * world.size
    dist.all_gather_object(values, value, group=world.cpu_group)
    return values  # type: ignore[return-value]


_LOST = ("gloo", "nccl", "connection reset by peer", "connection closed by peer", "broken pipe")


def as_lost_rank(error: BaseException, world: World) -> RankLostError | None:
    """The error as the loss of another rank, where it looks like one; None where this process itself failed."""
    if world.size == 1 or isinstance(error, NSAError):
        return None
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _LOST)
    ):
        return RankLostError(
            f"rank {world.rank}: another rank is gone or does not answer ({text}); its own last lines say why. "
            "The same command goes on from the last checkpoint"
        )
    return None
