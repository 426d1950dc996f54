"""Texts that a trained run generated: one per line in samples.jsonl of its folder, the newest last."""

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from nsa.files import regular
from nsa.run_folder import SAMPLES_FILE, run_of


@dataclass(frozen=True)
class Sample:
    """`text` is the continuation of the prompt; `weights` is the path of a file or checkpoint within the run folder."""

    time: float
    weights: str
    prompt: str
    text: str
    settings: Mapping[str, Any]

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of(cls, line: bytes) -> Self:
        """Parses a line of the file. Raises ValueError if it is damaged."""
        try:
            content = json.loads(line)
            values = [content[f.name] for f in fields(cls)]
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"not a sample: {error}") from None
        if not all(map(isinstance, values, (int | float, str, str, str, dict))):
            raise ValueError("not a sample: a value has the wrong type")
        return cls(*values)


def record_samples(weights: Path, prompts: Sequence[str], texts: Sequence[str], **settings: Any) -> None:
    """Appends prompts and texts to samples.jsonl of the run that the weights belong to; does nothing if they belong to
    no run. Warns if the file cannot be written."""
    folder = run_of(weights)
    if folder is None:
        return
    name = weights.absolute().relative_to(folder).as_posix()
    lines = (Sample(time.time(), name, *pair, settings).to_line() for pair in zip(prompts, texts, strict=True))
    try:
        with open(folder / SAMPLES_FILE, "a", encoding="utf-8", opener=regular) as file:
            file.write("".join(lines))
    except OSError as error:
        warnings.warn(f"{folder / SAMPLES_FILE}: the text is not recorded: {error.strerror}", stacklevel=2)
