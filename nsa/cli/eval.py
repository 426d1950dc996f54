"""`nsa eval`."""

import time
from pathlib import Path
from typing import Annotated

import typer

from nsa.cli.arguments import JoinedOverrides, TrainedModel, all_overrides, overrides_such_as
from nsa.cli.output import say
from nsa.config.schema import LONGEST_SEQUENCE
from nsa.errors import ConfigError, reworded

OTHER_TEXT = {"data.source", "data.paths", "data.repo", "data.mixture"}


def evaluate(
    source: TrainedModel,
    overrides: Annotated[list[str] | None, overrides_such_as("data.source=python")] = None,
    override: JoinedOverrides = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Context lengths in tokens.", show_default="train.seq_len")
    ] = None,
    samples: Annotated[
        int, typer.Option(metavar="N", min=1, help="Questions for every length and every depth or level.")
    ] = 32,
    selection: Annotated[
        bool,
        typer.Option("--selection", help="Measure how much of full attention the selected blocks of each layer hold."),
    ] = False,
    lm_eval: Annotated[
        str | None,
        typer.Option(
            metavar="TASKS",
            help="Run only these tasks of lm-evaluation-harness: names and folders of task files, separated by commas.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of the files it writes.", show_default="the folder of the run"),
    ] = None,
) -> None:
    """Measure a trained model: its loss by position in the context; recall, variable tracking and counting by length.

    The loss is measured on the run's validation data, or on other data: data.source=text data.paths=[books]
    """
    if lm_eval is not None and (lengths is not None or selection):
        raise ConfigError("--lm-eval: its tasks have their own lengths; leave --lengths and --selection out")
    wanted = _parse_lengths(lengths) if lengths is not None else None
    from rich.console import Console

    from nsa import load_run
    from nsa.evals.evaluate import evaluate, print_tables, write_json
    from nsa.inspect.run_report import render_evaluation, write_page
    from nsa.run_folder import EVALUATION_FILE, EVALUATION_PAGE, HARNESS_FILE, run_of

    given = all_overrides(overrides, override)
    keys = {text.partition("=")[0].strip() for text in given}
    if "data.validation_fraction" in keys and keys.isdisjoint(OTHER_TEXT):
        raise ConfigError(
            "override data.validation_fraction: with another share, text that the run trained on may be measured; "
            "leave it out, or name other text with data.source and data.paths"
        )
    if "train.seq_len" in keys and lm_eval is None:
        raise ConfigError("override train.seq_len: is the length of training; measure other lengths with --lengths")
    run = load_run(source, overrides=given)
    folder = out or run_of(run.weights) or (source if source.is_dir() else source.parent)
    with reworded(ConfigError, f"--out: {folder} cannot be used", "choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)  # before the measurement, which may take long
    changed = {"overrides": " ".join(given)}  # another model or other data than those of the run
    if lm_eval is not None:
        from nsa.hf.harness import print_table, run_tasks

        found = run_tasks(run, lm_eval) | changed
        write_json(found, folder / HARNESS_FILE)
        print_table(found, Console())
        say(f"{folder / HARNESS_FILE}: all numbers")
        return
    found = evaluate(run, wanted or [run.config.train.seq_len], samples, say, selection=selection) | changed
    write_json(found, folder / EVALUATION_FILE)
    print_tables(found, Console())
    say(f"{folder / EVALUATION_FILE}: all numbers")
    write_page(render_evaluation(found, source.absolute().name, time.time()), folder / EVALUATION_PAGE)
    say(f"{folder / EVALUATION_PAGE}: all figures, which nsa report shows too")


def _parse_lengths(text: str) -> list[int]:
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = [0]
    if not 2 <= lengths[0] <= lengths[-1] <= LONGEST_SEQUENCE:
        wanted = f"a list of lengths in tokens, 2 to {LONGEST_SEQUENCE:,}"
        raise ConfigError(f"--lengths: {text!r} is not {wanted}; give for example 2048,8192")
    return lengths
