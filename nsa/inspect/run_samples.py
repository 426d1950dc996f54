"""Samples of sparse attention from the tables of one or several ranks, merged as if one rank had seen all rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from nsa.inspect.run_files import Row, SampleTable
from nsa.record.schema import GateStats, SelectionStats, Table

T = TypeVar("T")


class Samples(Generic[T]):
    """One table of all ranks. A step is merged on request."""

    def __init__(self, table: Table, merge: Callable[[list[Row]], T]):
        self.table, self.files = table, dict[int, SampleTable]()
        self._merge = merge

    def refresh(self, folder: Path, world_size: int) -> None:
        """Files of ranks that the run no longer has may be of an earlier run: they are ignored."""
        paths = {0: self.table.files.path(folder, 0), **self.table.files.find(folder)}
        ranks = [rank for rank in paths if rank == 0 or rank < world_size]
        self.files = {rank: self.files.get(rank) or SampleTable(paths[rank], self.table) for rank in ranks}
        for file in self.files.values():
            file.refresh()

    @property
    def steps(self) -> list[int]:
        return sorted(set().union(*(file.rows for file in self.files.values())))

    @property
    def last_step(self) -> int:
        return max((max(file.rows) for file in self.files.values() if file.rows), default=0)

    def at(self, step: int) -> T | None:
        """The merged sample of a step; None where its columns are not those of this table."""
        rows = [row for _, file in sorted(self.files.items()) for row in file.rows.get(step, ())]
        try:
            return self._merge(rows) if rows else None
        except (KeyError, ValueError, ZeroDivisionError):
            return None

    def newest(self) -> T | None:
        return self.at(self.last_step)


def _by_layer(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["layer"], []).append(row)
    return found


def merge_layer_gates(rows: list[Row]) -> dict[str, GateStats]:
    return {layer: GateStats.merge([GateStats.of(row) for row in part]) for layer, part in _by_layer(rows).items()}


def merge_selection(rows: list[Row]) -> SelectionStats:
    return SelectionStats.merge([SelectionStats.of(row) for row in rows])


def merge_layer_selection(rows: list[Row]) -> dict[str, SelectionStats]:
    return {layer: merge_selection(part) for layer, part in _by_layer(rows).items()}


def total_fallbacks(samples: Samples[list[Row]]) -> dict[tuple[str, str], float]:
    """How often a fast kernel was wanted and not used, by branch and reason, over all ranks: the newest counts of
    each."""
    counts: dict[tuple[str, str], float] = {}
    for file in samples.files.values():
        for row in file.rows[max(file.rows)] if file.rows else []:
            key = (row["branch"], row["reason"])
            counts[key] = counts.get(key, 0.0) + row["count"]
    return dict(sorted(counts.items()))
