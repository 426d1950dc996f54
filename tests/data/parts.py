"""A process that prepares a part or merges all parts, until an armed fault kills it. Without torch it starts fast."""

from pathlib import Path

from nsa import faults
from nsa.data.prepare import merge, prepare
from nsa.data.sources.text import TextSource
from nsa.data.tokenizers import ByteTokenizer


def work_until(fault: str, folder: Path, texts: Path, shard_bytes: int, part: tuple[int, int] | None):
    faults.arm(fault)
    if part is None:
        merge(folder)
    else:
        prepare(TextSource([str(texts)]), ByteTokenizer(), folder, workers=1, shard_bytes=shard_bytes, part=part)
