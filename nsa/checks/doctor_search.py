"""From a case that fails to the smallest one that does, and what it cannot do without: the search of `nsa doctor`.

The search sets one factor after the other to its simplest value. A factor stays simple where the case still fails in
the same way, and is a cause where it no longer does. Then each branch of the attention runs alone, each kernel moves to
the reference, and layers and tokens are halved. That takes at most one trial per factor, three for the branches, one
per kernel and one per halving. Of several faults it finds one that suffices: fix it and search again.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

SYNTHETIC, SMALL, AS_GIVEN = "synthetic", "small", "as given"
MIN_TOKENS = 16
# What the forward pass of each branch alone runs; None is all of them, mixed.
OPERATORS: Mapping[str | None, tuple[str, ...]] = {
    "cmp": ("phi", "cmp"),
    "sel": ("phi", "cmp", "select", "sel"),
    "win": ("phi", "win"),
    None: ("phi", "cmp", "select", "sel", "win", "mix"),
}
BRANCH_OF = {"phi": "cmp", "cmp": "cmp", "select": "sel", "sel": "sel", "win": "win", "mix": None}


@dataclass(frozen=True)
class Case:
    """One combination of the factors. The reference computes the operators in `on_reference`."""

    layers: int
    tokens: int
    strategy: str = "single"
    checkpointing: str = "none"
    compiled: bool = False
    on_reference: tuple[str, ...] = ()
    branch: str | None = None
    data: str = SYNTHETIC
    batch: str = SMALL


@dataclass(frozen=True)
class Cause:
    """A factor without which nothing fails, its value, and both as text."""

    factor: str
    value: str
    text: str


ALL_KERNELS = Cause("kernel", "all", "the kernels, and no single one of them")
MIXTURE = Cause("branch", "mixture", "the mixture of the branches: each alone is sound")


Fails = Callable[[str, Case], bool]  # a name for the trial, and the case: does it fail in the same way?
Found = tuple[Case, list[Cause]]


def search(start: Case, fails: Fails, *, fast: tuple[str, ...], branches: bool, min_tokens: int) -> Found:
    """The smallest case that still fails, and its causes. `fast` are the operators with fast kernels; `branches`:
    whether they can run alone."""
    case, causes = start, list[Cause]()
    for name, simple, cause in _simplifications(start, fast):
        simpler = replace(case, **simple)
        if simpler != case:
            if fails(name, simpler):
                case = simpler
            else:
                causes.append(cause)
    if branches and case.branch is None:
        case, found = _search_branches(case, fails)
        causes += found
    if ALL_KERNELS in causes:  # which of them is found once the branch is known
        causes.remove(ALL_KERNELS)
        case, found = _search_kernels(case, fast, fails)
        causes += found
    for field, factor, least in (("layers", "layers", 1), ("tokens", "sequence length", min_tokens)):
        case, found = _halve(case, field, factor, least, fails)
        causes += found
    return case, causes


def _simplifications(start: Case, fast: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any], Cause]]:
    """The simplest value of each factor, and the cause if it matters. What makes trials slow goes first."""
    strategy, recompute = start.strategy, start.checkpointing
    yield "synthetic data", {"data": SYNTHETIC}, Cause("data", start.data, "data")
    yield "a small batch", {"batch": SMALL}, Cause("batch", start.batch, "batch size")
    yield f"without {strategy}", {"strategy": "single"}, Cause("strategy", strategy, f"strategy {strategy}")
    yield "not compiled", {"compiled": False}, Cause("compile", "true", "torch.compile")
    named = Cause("checkpointing", recompute, f"checkpointing ({recompute})")
    yield "without checkpointing", {"checkpointing": "none"}, named
    yield "all kernels on the reference", {"on_reference": fast}, ALL_KERNELS


def _search_branches(case: Case, fails: Fails) -> Found:
    def fails_alone(branch: str) -> bool:
        return fails(f"branch {branch} alone", replace(case, branch=branch))

    win, cmp = fails_alone("win"), fails_alone("cmp")
    if win and (cmp or fails_alone("sel")):  # they share only the layer around them: the branch does not matter
        return replace(case, branch="win"), []
    # The selected branch needs the scores of the compressed one, and may fail together with it.
    one = "win" if win else "cmp" if cmp else "sel" if fails_alone("sel") else None
    return (replace(case, branch=one), [Cause("branch", one, f"branch {one}")]) if one else (case, [MIXTURE])


def _search_kernels(case: Case, fast: tuple[str, ...], fails: Fails) -> Found:
    causes: list[Cause] = []
    for operator in OPERATORS[case.branch]:
        if operator in fast:
            simpler = replace(case, on_reference=(*case.on_reference, operator))
            if fails(f"kernel {operator} on the reference", simpler):
                case = simpler
            else:
                causes.append(Cause("kernel", operator, f"kernel {operator} (triton)"))
    return case, causes or [ALL_KERNELS]


def _halve(case: Case, field: str, factor: str, least: int, fails: Fails) -> Found:
    while (size := getattr(case, field)) > least:
        fewer = max(least, size // 2)
        smaller = replace(case, **{field: fewer})
        if not fails(f"{field}: {fewer}", smaller):
            return case, [Cause(factor, str(size), f"{factor}: fails with {size}, not with {fewer}")]
        case = smaller
    return case, []
