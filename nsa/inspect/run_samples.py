"""Samples of sparse attention from the CSV files of one or several ranks, merged as if one rank had seen all rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.inspect.run_files import Row, SampleTable, rank_files

BRANCHES = ("cmp", "sel", "win")
ALL_LAYERS = "all"


@dataclass(frozen=True)
class LayerGates:
    layer: str
    rows: float
    mean_entropy: float
    min_entropy: float
    largest_share: float
    collapsed: float
    shares: tuple[float, float, float]  # of BRANCHES


@dataclass(frozen=True)
class Selection:
    step: int
    rows: float
    mean_distinct: float
    max_distinct: float
    share_at_max: float
    share_forced: float
    agreement: float
    distances: dict[str, float]  # the share of blocks by distance, in blocks


class Samples:
    """The tables of all ranks under one name. A step is merged when somebody asks for it."""

    def __init__(self, stem: str, merge: Callable[[list[list[Row]]], Any], text: tuple[str, ...] = ()):
        self.stem, self.tables = stem, dict[int, SampleTable]()
        self._merge, self._text = merge, text

    def refresh(self, folder: Path, world_size: int) -> None:
        """Tables of ranks that the run no longer has may be of a run before: they are left out."""
        self.tables = {rank: table for rank, table in self.tables.items() if rank < world_size}
        self.tables.setdefault(0, SampleTable(folder / f"{self.stem}.csv", self._text))
        for rank, path in rank_files(folder, self.stem, "csv"):
            if rank < world_size:
                self.tables.setdefault(rank, SampleTable(path, self._text))
        for table in self.tables.values():
            table.refresh()

    @property
    def steps(self) -> list[int]:
        return sorted(set().union(*(table.rows for table in self.tables.values())))

    @property
    def last_step(self) -> int:
        return max((max(table.rows) for table in self.tables.values() if table.rows), default=0)

    def at(self, step: int) -> Any:
        """The merged sample of a step; None where its columns are not those of this table."""
        ranks = [rows for _, table in sorted(self.tables.items()) if (rows := table.rows.get(step))]
        try:
            return self._merge(ranks) if ranks else None
        except (KeyError, ValueError, ZeroDivisionError):
            return None

    def newest(self) -> Any:
        return self.at(self.last_step)

    def problems(self) -> Mapping[str, str]:
        return {f"{self.stem}{f'_rank{rank}' if rank else ''}.csv": t.problem for rank, t in self.tables.items()}


def merge_gates(ranks: list[list[Row]]) -> list[LayerGates]:
    return [_merge_layer(layer, rows) for layer, rows in _by_layer(ranks).items()]


def _by_layer(ranks: list[list[Row]]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for rows in ranks:
        for row in rows:
            found.setdefault(row["layer"], []).append(row)
    return found


def _merge_layer(layer: str, rows: list[Row]) -> LayerGates:
    weights = [row["rows"] for row in rows]
    return LayerGates(
        layer,
        sum(weights),
        _mean(rows, "mean_entropy", weights),
        min(row["min_entropy"] for row in rows),
        max(row["largest_share"] for row in rows),
        _mean(rows, "collapsed", weights),
        (_mean(rows, "share_cmp", weights), _mean(rows, "share_sel", weights), _mean(rows, "share_win", weights)),
    )


def merge_selection(ranks: list[list[Row]]) -> Selection:
    return _merge_rows([rank[-1] for rank in ranks])


def merge_layer_selection(ranks: list[list[Row]]) -> dict[str, Selection]:
    return {layer: _merge_rows(rows) for layer, rows in _by_layer(ranks).items()}


def _merge_rows(rows: list[Row]) -> Selection:
    """Agreement is weighted by blocks, since how many were compared is not written."""
    weights = [row["rows"] for row in rows]
    blocks = [row["rows"] * row["mean_distinct"] for row in rows]
    bins = [name for name in rows[0] if name.startswith("distance_")]
    return Selection(
        int(rows[0]["step"]),
        sum(weights),
        _mean(rows, "mean_distinct", weights),
        max(row["max_distinct"] for row in rows),
        _mean(rows, "share_at_max", weights),
        _mean(rows, "share_forced", blocks),
        _mean(rows, "agreement", blocks),
        {name.removeprefix("distance_"): _mean(rows, name, blocks) for name in bins},
    )


def _mean(rows: list[Row], name: str, weights: list[float]) -> float:
    if len(rows) == 1:
        return float(rows[0][name])  # as it is written, not rounded by a product
    return float(sum(row[name] * weight for row, weight in zip(rows, weights, strict=True)) / sum(weights))


@dataclass(frozen=True)
class Fallbacks:
    """How often a fast kernel was asked for and not used, by branch and reason, over all ranks."""

    counts: dict[tuple[str, str], float]

    @classmethod
    def of(cls, samples: Samples) -> "Fallbacks":
        counts: dict[tuple[str, str], float] = {}
        for table in samples.tables.values():
            for row in table.rows[max(table.rows)] if table.rows else []:
                key = (str(row.get("branch")), str(row.get("reason")))
                counts[key] = counts.get(key, 0.0) + float(row.get("count", 0.0))
        return cls(dict(sorted(counts.items())))

    @property
    def total(self) -> float:
        return sum(self.counts.values())
