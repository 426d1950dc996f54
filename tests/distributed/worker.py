"""One rank that trains several runs one after the other: starting Python and torch takes longer than a tiny run.

`python -m tests.distributed.worker JOBS.json`, a list of {"folder", "config", "accept_changes"?, "long"?}; where `long`
is true every pass counts as a long one, done in chunks. Under each folder every rank leaves `outcome_rank{r}.json` with
the error's exit code and text.
"""

import json
import os
import sys
import time
from pathlib import Path

from nsa.config import parse_config
from nsa.errors import NSAError
from nsa.nn import loss
from nsa.ops import long_mlp
from nsa.parallel import float8
from nsa.train import optimizer, train
from tests.distributed.launching import free_port

DEFAULTS = loss.LONG_PASS, loss.LOGITS_AT_ONCE, loss.FEWEST_AT_ONCE, long_mlp.CHUNK


def meeting_port(word: Path) -> str:
    """A port that is free now, chosen by rank 0 for the next run: one chosen early may be taken when its turn comes."""
    if os.environ["RANK"] == "0":
        aside = word.with_suffix(".aside")
        aside.write_text(str(free_port()))
        aside.rename(word)
    while not word.exists():
        time.sleep(0.01)
    return word.read_text()


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    optimizer.MOST_ELEMENTS = 2048  # several rounds in Muon
    float8.refusal = lambda *_: None  # a CPU emulates the products, which a run refuses
    for number, job in enumerate(jobs):
        if os.environ.get("WORLD_SIZE"):
            os.environ["MASTER_PORT"] = meeting_port(Path(f"{sys.argv[1]}.port{number}"))
        sizes = (1, 5000, 1, 48) if job.get("long") else DEFAULTS
        loss.LONG_PASS, loss.LOGITS_AT_ONCE, loss.FEWEST_AT_ONCE, long_mlp.CHUNK = sizes
        folder = Path(job["folder"])
        outcome = {"code": 0, "error": ""}
        try:
            train(parse_config(job["config"], "job"), folder, accept_changes=job.get("accept_changes", False))
        except NSAError as error:
            outcome = {"code": error.exit_code, "error": str(error)}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"outcome_rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as the command does among several ranks
