"""`training.csv`: one row a step."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class TrainingRow:
    """One optimizer step. The validation columns are empty where no validation was run."""

    step: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    toks_per_s: float
    step_s: float
    data_wait_s: float
    mem_gib: float
    val_loss: float | None = None
    val_bits_per_byte: float | None = None
    save_wait_s: float = 0.0  # how long training stood still for a checkpoint before this step
    skipped: int = 0  # 1: the optimizer did not move, because something was not finite


COLUMNS = tuple(f.name for f in fields(TrainingRow))
# What differs between two runs that did the same: they depend on the machine, not on the numbers.
MACHINE_COLUMNS = ("toks_per_s", "step_s", "data_wait_s", "mem_gib", "save_wait_s")
