"""Evaluates a run, prints the results as tables and writes them as JSON. `nsa.inspect.evaluation` draws them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nsa.data.recall import Prompts
from nsa.errors import ConfigError, DataError, reworded
from nsa.evals.scoring import inference, loss_by_position, recall_by_depth
from nsa.files import write_whole
from nsa.train.trained import TrainedRun

DEPTHS = (10, 5, 2)  # numbers of parts of a prompt to try, from the most
KEYS = ("one", "several")


def evaluate(
    run: TrainedRun, lengths: Sequence[int], samples: int, log: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measures loss and recall at every length and returns plain data. Calls `log` for every length beyond the training
    length, and when a length is done."""
    trained = run.config.train.seq_len
    prompts = _prompts(run, lengths)
    for length in lengths:
        if length > trained:
            log(f"{length:,} tokens are more than the {trained:,} that the run trained on (train.seq_len)")
    losses: list[dict[str, Any]] = []
    recall: list[dict[str, Any]] = []
    with inference(run):
        for length in sorted(lengths, reverse=True):  # the data may end before the longest
            buckets = loss_by_position(run, length, check=not losses)
            mean = sum(b.loss * b.tokens for b in buckets) / sum(b.tokens for b in buckets)
            losses.append({"length": length, "loss": mean, "buckets": [asdict(bucket) for bucket in buckets]})
            for keys in KEYS:
                by_depth = recall_by_depth(run, prompts[length][keys], samples)
                recall.append({"length": length, "keys": keys, "by_depth": by_depth})
            log(f"{length:,} tokens: loss {mean:.4f}, recall " + " and ".join(_summary(r) for r in recall[-2:]))
    return {
        "weights": str(run.weights),
        "trained_length": trained,
        "samples": samples,
        "loss": sorted(losses, key=itemgetter("length")),
        "recall": sorted(recall, key=itemgetter("length")),
    }


def _prompts(run: TrainedRun, lengths: Sequence[int]) -> dict[int, dict[str, Prompts]]:
    """Creates the prompts by length and keys, with as many depths as fit into the shortest length. Raises ConfigError
    early if a length is too short."""
    for num_depths in DEPTHS:
        prompts = {
            length: {keys: Prompts(run.tokenizer, length, num_depths, several=keys == "several") for keys in KEYS}
            for length in lengths
        }
        try:
            fit = [kind.has_room() for kind in prompts[min(lengths)].values()]
            if all(fit):
                break
        except ConfigError:
            if num_depths == DEPTHS[-1]:
                raise
    return prompts


def _summary(row: dict[str, Any]) -> str:
    by_depth = row["by_depth"]
    return f"{sum(by_depth) / len(by_depth):.1%} ({row['keys']} key{'s' if row['keys'] == 'several' else ''})"


def print_tables(found: dict[str, Any], console: Console) -> None:
    lengths = [f"{row['length']:,} tokens" for row in found["loss"]]
    table = Table("tokens of context", *lengths, title="loss by position, nats per token")
    by_place = [{bucket["first"]: bucket for bucket in row["buckets"]} for row in found["loss"]]
    for first in sorted(set().union(*by_place)):
        cells = [f"{buckets[first]['loss']:.4f}" if first in buckets else "" for buckets in by_place]
        last = max(buckets[first]["last"] for buckets in by_place if first in buckets)
        table.add_row(f"{first:,} to {last:,}", *cells)
    table.add_row("all", *(f"{row['loss']:.4f}" for row in found["loss"]))
    console.print(table)
    for keys in KEYS:
        rows = [row for row in found["recall"] if row["keys"] == keys]
        depths = len(rows[0]["by_depth"])
        columns = [f"{100 * d // depths}-{100 * (d + 1) // depths} %" for d in range(depths)]
        table = Table("tokens", *columns, title=f"exact answers in % by depth of the key, {keys} in the prompt")
        for row in rows:
            table.add_row(f"{row['length']:,}", *(f"{100 * share:.1f}" for share in row["by_depth"]))
        console.print(table)


def write_json(found: dict[str, Any], path: Path) -> None:
    with reworded(DataError, f"{path}: cannot be written", "choose another folder with --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(found, indent=1) + "\n")
