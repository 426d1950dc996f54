"""What happened to a run, one JSON object a line in `heartbeat_rank{r}.jsonl`.

Every line has time, rank, step and event; an incident has a kind and a message too. A line that cannot be written is
counted and dropped: events never stop a run.
"""

import json
import time
from pathlib import Path
from typing import Any


class EventLog:
    def __init__(self, folder: Path, rank: int):
        self.rank = rank
        self.dropped = 0
        self.incidents = 0
        self._path = folder / f"heartbeat_rank{rank}.jsonl"

    def emit(self, event: str, step: int, **values: Any) -> None:
        line = {"time": time.time(), "rank": self.rank, "step": step, "event": event, **values}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:
            self.dropped += 1

    def incident(self, kind: str, message: str, step: int) -> None:
        """Something that should not happen and did not end the run."""
        self.incidents += 1
        self.emit("incident", step, kind=kind, message=message)
