"""One rank that trains several runs one after the other: starting Python and torch takes longer than a tiny run.

`python -m tests.distributed.worker JOBS.json`, a list of {"folder", "config", "accept_changes"?}; under each folder
every rank leaves `outcome_rank{r}.json` with the error's exit code and text.
"""

import json
import os
import sys
from pathlib import Path

from nsa.config import parse_config
from nsa.errors import NSAError
from nsa.train import train


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    port = int(os.environ.get("MASTER_PORT", "0"))
    for number, job in enumerate(jobs):
        os.environ["MASTER_PORT"] = str(port + number)
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
