"""Evaluates a run, prints the results as tables and writes them as JSON. `nsa.inspect.evaluation` draws them."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nsa.data.recall import Parts, Prompts
from nsa.data.tasks import TASKS, TaskPrompts
from nsa.errors import ConfigError, DataError, reworded
from nsa.evals.scoring import inference, loss_by_position, recall_by_depth
from nsa.evals.selection import selection_by_layer
from nsa.files import write_whole
from nsa.formatting import plain
from nsa.train.trained import TrainedRun

DEPTHS = (10, 5, 2)  # numbers of parts of a prompt to try, from the most
KEYS = ("one", "several")
SELECTION = {"mass": "full attention in the selected blocks", "heaviest": "heaviest blocks that are selected"}


def evaluate(
    run: TrainedRun,
    lengths: Sequence[int],
    samples: int,
    log: Callable[[str], None] = lambda line: None,
    *,
    selection: bool = False,
) -> dict[str, Any]:
    """Measures loss, recall, tasks and, if asked, the selection at every length and returns plain data. Calls `log` for
    every length beyond the training length, and when a length is done. Recall and tasks stay empty, and `log` says so,
    if the tokenizer cannot encode them."""
    trained = run.config.train.seq_len
    can_ask = _can_ask(run, log)
    prompts = _prompts(run, lengths, samples) if can_ask else {}
    questions = {
        (length, name): TaskPrompts(run.tokenizer, name, length, min(lengths)) for length in prompts for name in TASKS
    }
    for length in lengths:
        if length > trained:
            log(f"{length:,} tokens are more than the {trained:,} that the run trained on (train.seq_len)")
    data: list[str] = []
    losses: list[dict[str, Any]] = []
    recall: list[dict[str, Any]] = []
    tasks: list[dict[str, Any]] = []
    by_layer: list[dict[str, Any]] = []
    with inference(run):
        for length in sorted(lengths, reverse=True):  # the data may end before the longest
            measured: AbstractContextManager[Any] = selection_by_layer(run.model) if selection else nullcontext()
            with measured as layers:
                buckets = loss_by_position(run, length, check=not losses, named=data.append)
            if not losses:
                log(f"data    {data[0]}")
            by_layer.append({"length": length, "layers": layers})
            mean = sum(b.loss * b.tokens for b in buckets) / sum(b.tokens for b in buckets)
            losses.append({"length": length, "loss": mean, "buckets": [asdict(bucket) for bucket in buckets]})
            for keys in KEYS if can_ask else ():
                by_depth = recall_by_depth(run, prompts[length][keys], samples)
                recall.append({"length": length, "keys": keys, "by_depth": by_depth})
            for name, task in TASKS.items() if can_ask else ():
                asked = questions[length, name]
                tasks.append({"length": length, "task": name, "levels": asked.levels, "unit": task.unit})
                tasks[-1]["by_level"] = recall_by_depth(run, asked, samples)
            means = [f"loss {mean:.4f}"]
            if can_ask:
                one, several = (_mean(row["by_depth"]) for row in recall[-2:])
                means += [f"recall of one key {one}, of several {several}"]
            means += [f"{row['task']} {_mean(row['by_level'])}" for row in tasks[-len(TASKS) :]]
            log(f"{length:,} tokens: " + ", ".join(means))
    return {
        "weights": str(run.weights),
        "data": data[0],
        "trained_length": trained,
        "samples": samples,
        "loss": sorted(losses, key=itemgetter("length")),
        "recall": sorted(recall, key=itemgetter("length")),
        "tasks": sorted(tasks, key=itemgetter("length")),
        **({"selection": sorted(by_layer, key=itemgetter("length"))} if selection else {}),
    }


def _can_ask(run: TrainedRun, log: Callable[[str], None]) -> bool:
    kinds: list[type[Parts]] = [Parts, *TASKS.values()]
    try:
        for parts in kinds:
            parts(run.tokenizer)
    except ConfigError as error:
        log(f"recall and tasks are left out: {error}")
        return False
    return True


def _prompts(run: TrainedRun, lengths: Sequence[int], samples: int) -> dict[int, dict[str, Prompts]]:
    """Creates the prompts by length and keys, with as many depths as fit into the shortest length. Raises ConfigError
    early if a length is too short for one of its prompts."""
    for num_depths in DEPTHS:
        prompts = {
            length: {keys: Prompts(run.tokenizer, length, num_depths, several=keys == "several") for keys in KEYS}
            for length in sorted(lengths)
        }
        with suppress(ConfigError):
            if all(kind.has_room() for kind in prompts[min(lengths)].values()):
                return prompts
    for kind in (kind for kinds in prompts.values() for kind in kinds.values()):
        for number, depths in enumerate(kind.questions(samples)):
            kind.make(depths, number)
    return prompts


def _mean(shares: Sequence[float]) -> str:
    return f"{sum(shares) / len(shares):.1%}"


def print_tables(found: dict[str, Any], console: Console) -> None:
    lengths = [f"{row['length']:,} tokens" for row in found["loss"]]
    table = Table("tokens of context", *lengths, title="loss by position, nats per token")
    by_place = [{bucket["first"]: bucket for bucket in row["buckets"]} for row in found["loss"]]
    for first in sorted(set().union(*by_place)):
        cells = [f"{buckets[first]['loss']:.4f}" if first in buckets else "" for buckets in by_place]
        last = max(buckets[first]["last"] for buckets in by_place if first in buckets)
        table.add_row(f"{first:,}" if first == last else f"{first:,} to {last:,}", *cells)
    table.add_row("all", *(f"{row['loss']:.4f}" for row in found["loss"]))
    console.print(table)
    for keys in KEYS if found["recall"] else ():
        rows = [row for row in found["recall"] if row["keys"] == keys]
        depths = len(rows[0]["by_depth"])
        names = [f"{100 * d // depths}-{100 * (d + 1) // depths} %" for d in range(depths)]
        by_depth = zip(*(row["by_depth"] for row in rows), strict=True)
        table = Table("depth", *lengths, title=f"exact answers in %, keys: {keys}")
        _print_shares(console, table, list(zip(names, by_depth, strict=True)))
    for name in TASKS if found["tasks"] else ():
        rows = [row for row in found["tasks"] if row["task"] == name]
        columns = [f"{rows[0]['unit']}: {level}" for level in rows[0]["levels"]]
        table = Table("tokens", *columns, title=f"exact answers in %, {name}")
        _print_shares(console, table, [(f"{row['length']:,}", row["by_level"]) for row in rows])
    for column, title in SELECTION.items() if "selection" in found else ():
        by_layer = zip(*(row["layers"] for row in found["selection"]), strict=True)
        shares = [(layers[0]["layer"], [layer[column] for layer in layers]) for layers in by_layer]
        _print_shares(console, Table("layer", *lengths, title=f"{title}, in %"), shares)


def _print_shares(console: Console, table: Table, rows: Sequence[tuple[str, Sequence[float]]]) -> None:
    for name, shares in rows:
        table.add_row(name, *(f"{100 * share:.1f}" for share in shares))
    console.print(table)


def write_json(found: dict[str, Any], path: Path) -> None:
    with reworded(DataError, f"{path}: cannot be written", "choose another folder with --out"):
        write_whole(path, json.dumps(plain(found), indent=1, allow_nan=False) + "\n")
