"""Samples of sparse attention from the tables of one or several ranks, merged as if one rank had seen all rows."""

from collections import defaultdict
from pathlib import Path
from typing import Generic, TypeVar

from nsa.inspect.run_files import SampleTable
from nsa.record.schema import ALL_LAYERS, GateStats, SelectionStats, Table

Stats = TypeVar("Stats", GateStats, SelectionStats)


class RankTables:
    """One table of all ranks; `files` is by rank."""

    def __init__(self, table: Table):
        self.table, self.files = table, dict[int, SampleTable]()

    def refresh(self, folder: Path, world_size: int) -> None:
        """Files of ranks that the run no longer has may be of an earlier run: they are ignored."""
        paths = {0: self.table.files.path(folder, 0), **self.table.files.find(folder)}
        ranks = [rank for rank in paths if rank == 0 or rank < world_size]
        self.files = {rank: self.files.get(rank) or SampleTable(paths[rank], self.table) for rank in ranks}
        for file in self.files.values():
            file.refresh()


class Samples(RankTables, Generic[Stats]):
    """Statistics of one kind. A step is merged on request."""

    def __init__(self, table: Table, kind: type[Stats]):
        super().__init__(table)
        self._kind: type[Stats] = kind

    @property
    def last_step(self) -> int:
        return max((max(file.rows) for file in self.files.values() if file.rows), default=0)

    def by_step(self) -> dict[int, dict[str, Stats]]:
        steps = sorted(set().union(*(file.rows for file in self.files.values())))
        return {step: found for step in steps if (found := self.at(step))}

    def at(self, step: int) -> dict[str, Stats]:
        """By layer, or ALL_LAYERS in a table without layers. Empty where the columns are not those of this table."""
        parts: dict[str, list[Stats]] = {}
        try:
            for row in (row for file in self.files.values() for row in file.rows.get(step, ())):
                parts.setdefault(row.get("layer", ALL_LAYERS), []).append(self._kind.of(row))
            return {layer: self._kind.merge(part) for layer, part in parts.items()}
        except (KeyError, ValueError, OverflowError, ZeroDivisionError):
            return {}


def total_fallbacks(tables: RankTables) -> dict[tuple[str, str], float]:
    """How often a fast kernel was wanted and not used, by branch and reason, over all ranks: the newest counts of
    each."""
    counts: defaultdict[tuple[str, str], float] = defaultdict(float)
    for file in tables.files.values():
        for row in file.rows[max(file.rows)] if file.rows else ():
            counts[row["branch"], row["reason"]] += row["count"]
    return dict(sorted(counts.items()))
