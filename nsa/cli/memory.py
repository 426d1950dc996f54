"""`nsa memory`."""

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa.cli.arguments import ConfigFile, JoinedOverrides, all_overrides, overrides_such_as
from nsa.cli.output import say
from nsa.config import load_config
from nsa.formatting import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from nsa.checks.memory_estimate import Card, Planner

_ROWS = {
    "optimizer": "optimizer state",
    "temporaries": "recomputed and temporary",
    "ddp": "DDP buckets",
    "fsdp": "FSDP gathered units and messages",
}
_CACHE_ROWS = {
    "sel": "tokens of the selected branch",
    "cmp": "compressed tokens",
    "win": "window branch",
    "tail": "raw tail of the compressed branch",
    "msa": "tokens of MSA layers",
    "index": "index keys of MSA layers",
    "dense": "dense layers",
    "window": "window layers",
    "table": "page table",
}


def memory(
    config: ConfigFile,
    overrides: Annotated[list[str] | None, overrides_such_as("train.seq_len=65536")] = None,
    override: JoinedOverrides = None,
    nproc: Annotated[int, typer.Option(metavar="N", help="Processes, one GPU each.")] = 1,
    card: Annotated[
        str | None,
        typer.Option(
            "--card",
            metavar="CARD",
            help="24gb, a100-40gb, l40s, a100-80gb, h100, h200, b200 or a number of GiB.",
            show_default="this GPU, or common cards",
        ),
    ] = None,
    cache: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Also estimate the cache of sequences of this length.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate the memory of CONFIG on each GPU, and the largest micro-batch that fits a card, without running it."""
    resolved = load_config(config, all_overrides(overrides, override), os.environ)
    from nsa.checks.memory_estimate import CARDS, COMMON_CARDS, Card, Planner, find_card, present_card

    asked = find_card(card) if card is not None else present_card()
    cards = [asked] if asked else [Card(name, CARDS[name]) for name in COMMON_CARDS]
    planner = Planner(resolved, nproc)
    cached = planner.estimate_cache(cache) if cache is not None else None
    found = _report(planner, cards)
    if cached:
        found["cache"] = asdict(cached) | {"most_sequences": {each.name: cached.most_sequences(each) for each in cards}}
    found["advice"] = planner.advice(asked) if asked else []
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _show(str(config), planner, found)


def _report(planner: "Planner", cards: list["Card"]) -> dict[str, Any]:
    """Returns the JSON form, from which the tables are also made."""
    from nsa.checks.memory_estimate import CONTEXT_GIB, GAPS, GRANULARITIES

    found, granularities = planner.estimate(), [planner.estimate(checkpointing=g) for g in GRANULARITIES]
    return {
        "schema": 1,
        "nproc": planner.nproc,
        "strategy": planner.strategy,
        "precision": planner.precision,
        "compile": planner.config.runtime.compile,
        "sequences_by_rank": planner.share,
        "estimate": {
            **{name: value for name, value in asdict(found).items() if name != "parts"},
            **{name: round(size) for name, size in found.parts.items()},
            "peak_gib": found.peak_gib,
            "needed_gib": found.needed_gib,
        },
        "checkpointing": {each.checkpointing: each.peak_gib for each in granularities},
        "compiled": {each.checkpointing: each.compiled_gib for each in granularities},
        "not_counted": planner.not_counted,
        "reserve": {"context_gib": CONTEXT_GIB, "gaps": GAPS},
        "cards": [
            {
                **asdict(card),
                "fits": found.needed_gib <= card.gib,
                "largest_micro_batch": largest,
                "usable_micro_batch": usable,
                "left_gib": card.gib - planner.estimate(usable).needed_gib if usable else None,
            }
            for card, (largest, usable) in zip(cards, map(planner.fit, cards), strict=True)
        ],
    }


def _show(file: str, planner: "Planner", found: dict[str, Any]) -> None:
    from rich.console import Console

    console, estimate, reserve = Console(highlight=False), found["estimate"], found["reserve"]
    parts = _table("on each GPU", "GiB")
    for part, size in planner.estimate().parts.items():
        name = planner.strategy if part == "strategy" else part
        if name != "single":
            parts.add_row(_ROWS.get(name, name), f"{size / 2**30:.2f}")
    parts.add_section()
    parts.add_row("peak, not compiled", f"{estimate['peak_gib']:.2f}")
    checkpointing = _table("runtime.gradient_checkpointing", "peak GiB", "with runtime.compile")
    for granularity, peak in found["checkpointing"].items():
        mark = " (configured)" if granularity == estimate["checkpointing"] else ""
        compiled = found["compiled"][granularity]
        saved = f"{compiled[0]:.2f} to {compiled[1]:.2f}" if compiled else "not measured"
        checkpointing.add_row(granularity + mark, f"{peak:.2f}", saved)
    cards = _table("card", "GiB", "as configured", "most sequences", "micro_batch", "GiB left")
    for card in found["cards"]:
        left = "" if card["left_gib"] is None else f"{card['left_gib']:.1f}"
        fits, usable = "fits" if card["fits"] else "TOO LARGE", str(card["usable_micro_batch"] or "none")
        cards.add_row(card["name"], f"{card['gib']:.1f}", fits, str(card["largest_micro_batch"]), usable, left)
    processes = counted(planner.nproc, "process", "processes")
    compiled = ", compiled" if found["compile"] else ""
    say(f"{file}: {processes}, {planner.strategy}, {planner.precision}{compiled}")
    ranks = planner.config.parallel.context
    shared = f", each over {ranks} processes" if ranks > 1 else ""
    console.print(f"micro-batch {estimate['micro_batch']} x {planner.config.train.seq_len} tokens{shared}\n")
    console.print(parts)
    gradients = estimate["all_gradients"] / 2**30
    console.print(f"The peak is in the {estimate['moment']}. Gradients when backward ends: {gradients:.2f} GiB.\n")
    console.print(checkpointing)
    console.print()
    console.print(cards)
    console.print(f"micro_batch: the largest that fits and divides the {planner.share} sequences of a rank in a step.")
    console.print(f"Reserved: {reserve['context_gib']:g} GiB for CUDA and NCCL, and {reserve['gaps']:.0%} for gaps.")
    if found["compile"] and estimate["compiled_gib"]:
        console.print("Cards are compared with the upper end of the range with runtime.compile.")
    for line in found["not_counted"]:
        console.print(f"Not counted: {line}.", soft_wrap=True)
    if planner.config.runtime.device == "cpu":
        console.print("runtime.device is cpu: the figures are for a GPU.")
    if found["advice"]:
        needed, card = estimate["needed_gib"], found["cards"][0]
        console.print(f"\nDOES NOT FIT {card['name']}: {needed:.1f} GiB of {card['gib']:.1f}. Use one of:")
        for line in found["advice"]:
            console.print(f"  {line}", soft_wrap=True)
    if "cache" in found:
        _show_cache(console, found["cache"])


def _show_cache(console: "Console", found: dict[str, Any]) -> None:
    mib = 2**20
    parts = _table(f"cache of a sequence of {found['tokens']} tokens, {found['dtype']}", "MiB")
    for part, size in found["parts"].items():
        if size:
            parts.add_row(_CACHE_ROWS.get(part, part), f"{size / mib:.2f}")
    parts.add_section()
    parts.add_row("one sequence", f"{sum(found['parts'].values()) / mib:.2f}")
    parts.add_row("weights", f"{found['weights'] / mib:.2f}")
    console.print()
    console.print(parts)
    for card, most in found["most_sequences"].items():
        console.print(f"{card}: {most} sequences of this length fit besides the weights")


def _table(*columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
