"""The `nsa` command, with retries of a save that follow at once: `python -m tests.faults.impatient train ...`."""

from nsa.cli.main import main
from nsa.train import checkpointing

if __name__ == "__main__":
    checkpointing.RETRY_S = (0.0, 0.0)
    checkpointing.Checkpointing.pause = staticmethod(lambda seconds: None)
    main()
