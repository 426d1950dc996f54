"""`nsa memory`."""

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa.cli.arguments import ConfigFile, JoinedOverrides, Overrides, all_overrides
from nsa.config import load_config

if TYPE_CHECKING:
    from rich.table import Table

    from nsa.checks.memory import Estimate, Fit, Planner

SCHEMA = 1
_ROWS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "temporaries": "recomputed and temporary",
    "workspaces": "kernels' workspaces",
}
_BUFFERS = {"ddp": "DDP's buckets", "fsdp": "FSDP's gathered units and messages"}


def memory(
    config: ConfigFile,
    overrides: Overrides = None,
    override: JoinedOverrides = None,
    nproc: Annotated[int, typer.Option("--nproc", metavar="N", help="Processes, one GPU each.")] = 1,
    card: Annotated[
        str | None,
        typer.Option("--card", help="24gb, a100-40gb, a100-80gb, h100, h200, ... or GiB.", show_default="this GPU"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate what CONFIG needs on each GPU, and the largest micro-batch that fits a card. Starts nothing."""
    resolved = load_config(config, all_overrides(overrides, override), os.environ)
    from nsa.checks.memory import CARDS, COMMON_CARDS, GRANULARITIES, Card, Planner, find_card, present_card

    asked = find_card(card) if card is not None else present_card()
    cards = [asked] if asked else [Card(name, CARDS[name]) for name in COMMON_CARDS]
    planner = Planner(resolved, nproc)
    by_granularity = [planner.estimate(checkpointing=granularity) for granularity in GRANULARITIES]
    fits = [planner.fit(each) for each in cards]
    advice = planner.advice(asked) if asked else []
    if as_json:
        import json

        print(json.dumps(_as_json(planner, by_granularity, fits, advice), indent=1))
    else:
        _show(str(config), planner, by_granularity, fits, advice)


def _as_json(
    planner: "Planner", by_granularity: list["Estimate"], fits: list["Fit"], advice: list[str]
) -> dict[str, Any]:
    from nsa.checks.memory import CONTEXT_GIB, GAPS

    return {
        "schema": SCHEMA,
        "nproc": planner.nproc,
        "strategy": planner.strategy,
        "precision": planner.precision,
        "compile": planner.config.runtime.compile,
        "sequences_by_rank": planner.share,
        "estimate": planner.estimate().as_json(),
        "checkpointing": {found.checkpointing: found.peak_gib for found in by_granularity},
        "reserve": {"context_gib": CONTEXT_GIB, "gaps": GAPS},
        "cards": [
            {
                "name": fit.card.name,
                "gib": fit.card.gib,
                "fits": fit.configured_fits,
                "largest_micro_batch": fit.largest,
                "usable_micro_batch": fit.usable,
                "left_gib": fit.left_gib,
            }
            for fit in fits
        ],
        "advice": advice,
    }


def _show(
    name: str, planner: "Planner", by_granularity: list["Estimate"], fits: list["Fit"], advice: list[str]
) -> None:
    from rich.console import Console

    from nsa.checks.memory import CONTEXT_GIB, GAPS

    console, found = Console(highlight=False), planner.estimate()
    compiled = ", compiled" if planner.config.runtime.compile else ""
    processes = f"{planner.nproc} process{'es' if planner.nproc > 1 else ''}"
    console.print(f"{name}: {processes}, {planner.strategy}, {planner.precision}{compiled}", soft_wrap=True)
    console.print(f"micro-batch {found.micro_batch} x {planner.config.train.seq_len} tokens\n")
    console.print(_what_is_held(planner))
    console.print(
        f"Highest in the {found.moment}. When backward ends, gradients are {_gib(found.all_gradients)} GiB.\n"
    )
    console.print(_by_checkpointing(planner, by_granularity))
    console.print()
    console.print(_by_card(fits))
    console.print(f"micro_batch: fits and divides the {planner.share} sequences of a rank in a step.")
    console.print(f"Kept free: {CONTEXT_GIB:g} GiB for CUDA and NCCL, and {GAPS:.0%} of the peak for gaps.")
    if planner.config.runtime.device == "cpu":
        console.print("runtime.device is cpu: the figures are what a GPU would need.")
    if advice:
        needed, card = planner.estimate().needed_gib, fits[0].card
        console.print(f"\nDOES NOT FIT {card.name}: {needed:.1f} GiB of {card.gib:.1f}. Each of these fits:")
        for line in advice:
            console.print(f"  {line}", soft_wrap=True)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _table(*columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _what_is_held(planner: "Planner") -> "Table":
    found = planner.estimate()
    table = _table("on each GPU", "GiB")
    for field, row in _ROWS.items():
        table.add_row(row, _gib(getattr(found, field)))
    if planner.strategy in _BUFFERS:
        table.add_row(_BUFFERS[planner.strategy], _gib(found.strategy))
    table.add_section()
    table.add_row("peak", _gib(found.peak))
    return table


def _by_checkpointing(planner: "Planner", by_granularity: list["Estimate"]) -> "Table":
    table = _table("runtime.gradient_checkpointing", "peak GiB")
    configured = planner.config.runtime.gradient_checkpointing
    for found in by_granularity:
        mark = " (configured)" if found.checkpointing == configured else ""
        table.add_row(found.checkpointing + mark, f"{found.peak_gib:.2f}")
    return table


def _by_card(fits: list["Fit"]) -> "Table":
    table = _table("card", "GiB", "as configured", "most sequences", "micro_batch", "GiB left")
    for fit in fits:
        left = "" if fit.left_gib is None else f"{fit.left_gib:.1f}"
        fitting = "fits" if fit.configured_fits else "TOO LARGE"
        usable = str(fit.usable) if fit.usable else "none"
        table.add_row(fit.card.name, f"{fit.card.gib:.1f}", fitting, str(fit.largest), usable, left)
    return table
