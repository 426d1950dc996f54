"""Runs tasks of lm-evaluation-harness on a run, through the classes for transformers: `nsa eval --lm-eval`."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nsa.errors import ConfigError, DataError, printable, reworded
from nsa.hf.exporter import as_transformers_model
from nsa.hf.tokenizer import fast_tokenizer
from nsa.parallel.numerics import compute_precision, numerics
from nsa.train.state import AUTOCAST_TYPES
from nsa.train.trained import TrainedRun

TOKENS_PER_PASS = {"cuda": 1 << 14, "cpu": 1}  # logits of all tokens exist at once


def run_tasks(run: TrainedRun, wanted: str) -> dict[str, Any]:
    """Returns plain data: the results by task.

    wanted   names of tasks that the harness contains, and folders with task files, separated by commas. Of a folder,
             all tasks are run. Task files may name Python functions, which are executed

    Raises ConfigError if the harness is not installed or a name is not a task, and DataError if a task cannot be run.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError("--lm-eval: the package lm_eval is not installed: pip install lm_eval")
    import lm_eval
    from datasets.exceptions import DatasetsError
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from yaml import YAMLError

    problems = (OSError, ValueError, LookupError, TypeError, DatasetsError, YAMLError)
    device = run.model.head.weight.device
    with numerics(run.config.runtime), reworded(DataError, f"--lm-eval: {wanted} cannot be run", caught=problems):
        parts = [part for part in wanted.split(",") if part]
        folders = [part for part in parts if Path(part).is_dir()]
        names = [part for part in parts if part not in folders]
        own = TaskManager(include_path=folders, include_defaults=False)
        manager = TaskManager(include_path=folders) if names else own
        for name in names:
            if name not in manager.all_tasks:
                raise ConfigError(f"--lm-eval: {name!r} is neither a folder nor a task of lm_eval {version('lm_eval')}")
        if not (tasks := [*own.all_subtasks, *names]):
            raise ConfigError(f"--lm-eval: {wanted} has no task file; give a folder with a YAML file per task")
        model = HFLM(
            as_transformers_model(run),
            tokenizer=fast_tokenizer(run.tokenizer, run.config.train.seq_len),
            batch_size=max(1, TOKENS_PER_PASS[device.type] // run.config.train.seq_len),
            mixed_precision_dtype=AUTOCAST_TYPES.get(compute_precision(run.config.runtime.precision, device)),
        )
        found = lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, log_samples=False)
    return {
        "weights": str(run.weights),
        "lm_eval": version("lm_eval"),
        "results": found["results"],
        "samples": {task: counts["effective"] for task, counts in found["n-samples"].items()},
        "num_fewshot": found["n-shot"],
        "versions": found["versions"],
    }


def print_table(found: dict[str, Any], console: Console) -> None:
    table = Table("task", "metric", "value", "standard error", title=f"lm-evaluation-harness {found['lm_eval']}")
    for task, measured in found["results"].items():
        for key, value in measured.items():
            metric, _, choice = key.partition(",")  # as in "acc,none" and "acc_stderr,none"
            if isinstance(value, float) and not metric.endswith("_stderr"):
                error = measured.get(f"{metric}_stderr,{choice}")
                shown = f"{error:.4f}" if isinstance(error, float) else ""
                table.add_row(printable(task), printable(metric), f"{value:.4f}", shown)
    console.print(table)
