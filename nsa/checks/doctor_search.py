"""From a case that fails to the smallest one that does, and what it cannot do without: the search of `nsa doctor`.

Every factor is set to its simplest value, one after the other: what still fails in the same way stays simple, what no
longer fails names the factor guilty. Then each branch of the attention is tried alone, each kernel is put on the
reference, and layers and tokens are halved. That takes at most one trial a factor, three for the branches, one a kernel
and one a halving. Of several faults it finds one that suffices: mend it and start again.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

SYNTHETIC, SMALL, AS_GIVEN = "synthetic", "small", "as given"
FEWEST_TOKENS = 16
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
    """One combination of the factors. `slow` are the operators that the reference computes."""

    layers: int
    tokens: int
    strategy: str = "single"
    checkpointing: str = "none"
    compiled: bool = False
    slow: tuple[str, ...] = ()
    branch: str | None = None
    data: str = SYNTHETIC
    batch: str = SMALL


@dataclass(frozen=True)
class Guilty:
    """A factor without which nothing fails, its value, and both in words."""

    factor: str
    value: str
    text: str


@dataclass(frozen=True)
class Space:
    """What the search may vary: operators that fast kernels compute, whether branches can be tried alone."""

    fast: tuple[str, ...] = ()
    branches: bool = True
    fewest_tokens: int = FEWEST_TOKENS


Fails = Callable[[str, Case], bool]  # a name for people, and the case: whether it fails in the same way


def search(start: Case, space: Space, fails: Fails) -> tuple[Case, list[Guilty]]:
    """The smallest case that still fails, and what it cannot do without."""
    case, guilty, kernels_matter = start, list[Guilty](), False
    for factor, name, simple in _simple_values(start, space):
        simpler = replace(case, **simple)
        if simpler == case:
            continue
        if fails(name, simpler):
            case = simpler
        elif factor == "kernels":
            kernels_matter = True  # which of them is found once the branch is known
        else:
            guilty.append(_guilty(factor, start))
    if space.branches and case.branch is None:
        case, found = _search_branches(case, fails)
        guilty += found
    if kernels_matter:
        case, found = _search_kernels(case, space, fails)
        guilty += found
    for field, factor, fewest in (("layers", "layers", 1), ("tokens", "sequence length", space.fewest_tokens)):
        case, found = _halve(case, field, factor, fewest, fails)
        guilty += found
    return case, guilty


def _simple_values(start: Case, space: Space) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each factor's simplest value. What makes trials slow goes first."""
    yield "data", "synthetic data", {"data": SYNTHETIC}
    yield "batch", "a small batch", {"batch": SMALL}
    yield "strategy", f"without {start.strategy}", {"strategy": "single"}
    yield "compile", "not compiled", {"compiled": False}
    yield "checkpointing", "without checkpointing", {"checkpointing": "none"}
    yield "kernels", "all kernels on the reference", {"slow": space.fast}


def _guilty(factor: str, start: Case) -> Guilty:
    value, text = {
        "data": (start.data, "data"),
        "batch": (start.batch, "batch size"),
        "strategy": (start.strategy, f"strategy {start.strategy}"),
        "compile": ("true", "torch.compile"),
        "checkpointing": (start.checkpointing, f"checkpointing ({start.checkpointing})"),
    }[factor]
    return Guilty(factor, value, text)


def _search_branches(case: Case, fails: Fails) -> tuple[Case, list[Guilty]]:
    def alone(branch: str) -> bool:
        return fails(f"branch {branch} alone", replace(case, branch=branch))

    win, cmp = alone("win"), alone("cmp")
    if win and cmp:  # they share nothing but the layer around them: it is no matter of the branch
        return replace(case, branch="win"), []
    sel = alone("sel")
    if win and sel:
        return replace(case, branch="win"), []
    # The selected branch needs the compressed one's scores, and may fail along with it.
    one = "cmp" if cmp else "win" if win else "sel" if sel else None
    if one is None:
        return case, [Guilty("branch", "mixture", "the mixture of the branches: each alone is sound")]
    return replace(case, branch=one), [Guilty("branch", one, f"branch {one}")]


def _search_kernels(case: Case, space: Space, fails: Fails) -> tuple[Case, list[Guilty]]:
    guilty: list[Guilty] = []
    for operator in OPERATORS[case.branch]:
        if operator in space.fast:
            simpler = replace(case, slow=(*case.slow, operator))
            if fails(f"kernel {operator} on the reference", simpler):
                case = simpler
            else:
                guilty.append(Guilty("kernel", operator, f"kernel {operator} (triton)"))
    return case, guilty or [Guilty("kernel", "all", "the kernels, and no single one of them")]


def _halve(case: Case, field: str, factor: str, fewest: int, fails: Fails) -> tuple[Case, list[Guilty]]:
    while (size := getattr(case, field)) > fewest:
        fewer = max(fewest, size // 2)
        smaller = replace(case, **{field: fewer})
        if not fails(f"{field}: {fewer}", smaller):
            return case, [Guilty(factor, str(size), f"{factor}: fails with {size}, not with {fewer}")]
        case = smaller
    return case, []
