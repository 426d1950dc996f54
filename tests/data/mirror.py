"""Parquet files like FineWeb-Edu's: its folders, its columns with their types, and texts that are all different."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nsa.config.schema import SourceConfig
from nsa.data.sources.base import Skipped
from nsa.data.sources.registry import open_source

FIRST = "sample/10BT/000_00000.parquet"  # the first file that is written
WORDS = [
    "the",
    "of",
    "learning",
    "naïve",
    "water",
    "école",
    "cell",
    "数学",
    "числа",
    "light",
    "☃",
    "😀",
    "energy",
    "number",
]
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("text", "id", "dump", "url", "file_path", "language")),
        ("language_score", pa.float64()),
        ("token_count", pa.int64()),
        ("score", pa.float64()),
        ("int_score", pa.int64()),
    ]
)


def write_mirror(folder, files=3, row_groups=4, rows=50, subset="sample/10BT", seed=0, fat=0):
    """Writes `files` files below `folder`/`subset` and returns their texts in order.

    With `fat` every row carries that many bytes beside its text, which do not compress.
    """
    chosen = random.Random(f"{subset} {seed}")
    target = Path(folder) / subset
    target.mkdir(parents=True, exist_ok=True)
    texts = []
    for file in range(files):
        with pq.ParquetWriter(target / f"{file:03d}_00000.parquet", SCHEMA, compression="snappy") as writer:
            for group in range(row_groups):
                table = _table(f"{subset} {seed} {file} {group}", rows, chosen, fat)
                texts += table["text"].to_pylist()
                writer.write_table(table, row_group_size=rows)
    return texts


def texts_of(source):
    """Every document of a source, of which none may be left out."""
    skipped = Skipped()
    texts = [text for unit in source.units() for text in source.documents(unit, skipped)]
    assert not skipped
    return texts


def _table(place, rows, chosen, fat):
    texts = [f"{place} {row}: " + " ".join(chosen.choices(WORDS, k=chosen.randint(5, 60))) for row in range(rows)]
    columns = {
        "text": texts,
        "id": [f"<urn:uuid:{chosen.getrandbits(128):032x}>" for _ in texts],
        "dump": ["CC-MAIN-2024-10"] * rows,
        "url": [f"https://example.org/{chosen.getrandbits(40):x}" for _ in texts],
        "file_path": [f"s3://commoncrawl/{chosen.randbytes(fat // 2).hex()}" for _ in texts],
        "language": ["en"] * rows,
        "language_score": [chosen.random() for _ in texts],
        "token_count": [len(text) // 4 for text in texts],
        "score": [2.5 + chosen.random() for _ in texts],
        "int_score": [3] * rows,
    }
    return pa.table(columns, schema=SCHEMA)


def fineweb_edu(subset="sample-10BT", *, paths=(), deadline_s=60.0, **more):
    source = SourceConfig(source="fineweb_edu", subset=subset, paths=list(paths), **more)
    return open_source(source, deadline_s)
