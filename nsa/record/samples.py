"""Texts that a trained run wrote, a line each in samples.jsonl of its folder, the newest last."""

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
    """`text` is what followed the prompt; `weights` is a file or a checkpoint, by its path in the folder of the run."""

    time: float
    weights: str
    prompt: str
    text: str
    settings: Mapping[str, Any]

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of(cls, line: bytes) -> Self:
        """From a line of the file. Raises ValueError where it is damaged."""
        try:
            content = json.loads(line)
            values = [content[f.name] for f in fields(cls)]
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"is no sample: {error}") from None
        if not all(map(isinstance, values, (int | float, str, str, str, dict))):
            raise ValueError("is no sample: a value has the wrong type")
        return cls(*values)


def record_samples(weights: Path, prompts: Sequence[str], texts: Sequence[str], **settings: Any) -> None:
    """Adds what followed each prompt to the run that the weights belong to; nothing is kept for weights outside of one.
    Warns where that cannot be written."""
    folder = run_of(weights)
    if folder is None:
        return
    name = weights.absolute().relative_to(folder).as_posix()
    lines = (Sample(time.time(), name, *pair, settings).to_line() for pair in zip(prompts, texts, strict=True))
    try:
        with open(folder / SAMPLES_FILE, "a", encoding="utf-8", opener=regular) as file:
            file.write("".join(lines))
    except OSError as error:
        warnings.warn(f"{folder / SAMPLES_FILE}: the text is not kept: {error.strerror}", stacklevel=2)
