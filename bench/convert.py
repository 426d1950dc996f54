"""Converts a dense model to NSA and to MSA with the recipes of configs/convert.yaml and configs/convert_msa.yaml.

    python -m bench.learning prepare WORK            # text, vocabulary and shards
    python -m bench.convert run WORK --rows dense    # the dense model, the run `dense` of bench.learning
    python -m bench.convert run WORK --jobs 2        # converts it, for rows that are not in the results yet
    python -m bench.convert show                     # the results as a table
    python -m bench.convert page                     # and in docs/huggingface.md, with a figure

A conversion takes at most a tenth of the dense model's tokens, both stages together. `dense-continued` trains the dense
model on the same tokens with the settings of the second stage, which separates the cost of conversion from the gain of
more training. `--recall` converts the dense model of `bench.learning recall` on its documents, and measures recall
before and after. Commands are those of a user (`nsa export`, `nsa import`, `nsa train`, `nsa eval`), each in its own
process; a run that was stopped is resumed.
"""

import argparse
import hashlib
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

from bench import figures, learning
from bench.learning import BATCH, EVAL_TOKENS, RECALL_BATCH, run_logged, validations
from bench.learning_rows import RATE, RECALL_RATE, read_results
from bench.output import Results, add_dirty_option

RESULTS, RECALL_RESULTS = Path("bench/results/convert-h200.jsonl"), Path("bench/results/convert-recall-h200.jsonl")
FIGURE, PAGE = Path("docs/img/convert.svg"), Path("docs/huggingface.md")
MARKS = "<!-- made by python -m bench.convert page -->\n", "<!-- end -->\n"
SHARE = 0.1  # of the dense model's tokens
FIRST_STAGE = 0.2  # share of the first stage in these
# The recipes contain the settings of the first stage; these are the second's.
SECOND = "train.freeze=[] train.lr=3e-4 train.weight_decay=0.1"
RECIPES = {"dense": "convert", "nsa": "convert", "msa": "convert_msa"}
# Which model a row starts from, and whether it has the first stage.
ROWS = {
    "two-stages": ("nsa", True),
    "second-stage-alone": ("nsa", False),
    "msa-two-stages": ("msa", True),
    "msa-second-stage-alone": ("msa", False),
    "dense-continued": ("dense", False),
}
EVALUATIONS = 8  # per conversion
DATA = (
    "data.isolate_documents=true data.validation_fraction=0.02 data.workers=4 runtime.compile=true "
    "telemetry.tensorboard=false runtime.cuda_graphs=false checkpoint.every=50"
)


def dense_run(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Trains the dense model, or resumes it, unless it has finished."""
    folder = dense_folder(work, options)
    code = 0
    if not is_finished(folder):
        overrides = learning.overrides_of(work, "dense", for_dense(options), options.seed, options.rate)
        code = run_logged(["train", learning.CONFIG, *overrides], work / f"{folder.name}.log")
    found = result_of("dense", options, code, curve_of([folder], options.seq_len * options.batch_size))
    return found | (recall_of({"end": folder}, options) if code == 0 else {})


def overrides_for(kind: str, options: argparse.Namespace) -> list[str]:
    """Without the sections of other kinds of attention, which a configuration refuses."""
    others = {"nsa", "msa"} - {kind}
    return [override for override in options.override if override.partition(".")[0] not in others]


def recall_of(folders: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """Recall of the models, by depth and keys, where the study is about it."""
    if options.action != "recall":
        return {}
    measured = {when: learning.evaluate(f, options.lengths, log_of(f)) for when, f in folders.items()}
    found = {when: found.get("recall", []) for when, (_, found) in measured.items()}
    codes = [code for code, _ in measured.values()]  # negative after a signal
    return {"recall": found, "exit_code": next(filter(None, codes), 0)}


def log_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")  # the suffix of a folder may be part of its rate


def dense_folder(work: Path, options: argparse.Namespace) -> Path:
    return learning.folder_of(work, "dense", for_dense(options), options.seed, options.rate)


def for_dense(options: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**vars(options) | {"override": overrides_for("dense", options)})


def is_finished(folder: Path) -> bool:
    return (folder / "model.safetensors").is_file()


def import_all(work: Path, options: argparse.Namespace) -> dict[str, Path]:
    """The dense model imported by `nsa import`, unchanged and converted: teacher and students."""
    dense = dense_folder(work, options)
    if not is_finished(dense):
        sys.exit(f"{dense}: has not finished; run it first: python -m bench.convert run {work} --rows dense")
    # Different overrides give different models: each set has its own folder.
    marks = hashlib.sha256(" ".join(options.override).encode()).hexdigest()[:8]
    made = work / "convert" / options.corpus / (f"{dense.name}-{marks}" if options.override else dense.name)
    log = work / f"{dense.name}-convert.log"
    if not (made / "hf").exists() and run_logged(["export", str(dense), str(made / "hf")], log):
        sys.exit(f"nsa export {dense} failed; see {log}")
    shared = [
        *DATA.split(),
        *learning.data_of(work, options),
        f"train.seq_len={options.seq_len}",
        f"train.eval_sequences={learning.eval_sequences(options)}",
    ]
    for kind, recipe in RECIPES.items():
        if not (made / kind / "config.yaml").exists():  # written last
            shutil.rmtree(made / kind, ignore_errors=True)
            arguments = ["import", str(made / "hf"), str(made / kind), "--config", recipe, *shared]
            arguments += overrides_for(kind, options)
            if run_logged([*arguments, *([] if kind == "dense" else ["--attention", kind])], log):
                sys.exit(f"nsa import {made / 'hf'} failed; see {log}")
    return {kind: made / kind for kind in RECIPES}


def stages_of(row: str, models: dict[str, Path], options: argparse.Namespace) -> list[tuple[Path, list[str]]]:
    """The run folder and the overrides of every stage of a row."""
    kind, has_first = ROWS[row]
    total = int(SHARE * learning.steps_of(options) * options.batch_size) // batch_of(options)
    first = max(1, round(FIRST_STAGE * total)) if has_first else 0
    is_msa = kind == "msa"
    start = [f"msa.warmup_steps={first}"] if is_msa else [f"train.teacher={models['dense']}"]
    stages = [("1", first, start)] if has_first else []
    stages += [("2", total - first, [*SECOND.split(), *(["msa.warmup_steps=0"] if is_msa else [])])]
    found: list[tuple[Path, list[str]]] = []
    for name, steps, settings in stages:
        folder = models[kind].parent / f"{row}-{name}"
        overrides = [
            f"train.steps={steps}",
            f"train.warmup_steps={max(1, steps // 20)}",
            f"train.batch_size={batch_of(options)}",
            f"train.eval_every={max(1, total // EVALUATIONS)}",
            f"train.seed={options.seed + 1000}",  # other sequences than the dense model read first
            f"train.init_from={found[-1][0] if found else models[kind]}",
            f"train.out_dir={folder}",
            *settings,
            *overrides_for(kind, options),
        ]
        found.append((folder, overrides))
    return found


def batch_of(options: argparse.Namespace) -> int:
    """Half the dense model's batch, for more steps from few tokens."""
    return max(1, options.batch_size // 2)


def convert(row: str, models: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    stages = stages_of(row, models, options)
    code = 0
    for folder, overrides in stages:
        if code == 0 and not is_finished(folder):
            recipe = str(models[ROWS[row][0]] / "config.yaml")
            code = run_logged(["train", recipe, *overrides], log_of(folder))
    tokens = options.seq_len * batch_of(options)
    kind, has_first = ROWS[row]
    curve = [(0, start_loss(models[kind])), *curve_of([folder for folder, _ in stages], tokens)]
    if has_first and kind == "msa" and code == 0:  # its validations were those of dense attention
        first = tokens * steps_in(stages[0][1])
        curve = [curve[0], (first, start_loss(stages[0][0])), *(point for point in curve if point[0] > first)]
    found = result_of(row, options, code, curve)
    if has_first:
        found["first_stage_tokens"] = tokens * steps_in(stages[0][1])
    return found | (recall_of({"start": models[kind], "end": stages[-1][0]}, options) if code == 0 else {})


def steps_in(overrides: list[str]) -> int:
    return int(next(o for o in overrides if o.startswith("train.steps=")).partition("=")[2])


def start_loss(folder: Path) -> float:
    """The validation loss of an imported model, on the sequences of the runs' validations."""
    from nsa import load_run
    from nsa.evals.scoring import inference, loss_by_position

    run = load_run(folder)
    with inference(run):
        buckets = loss_by_position(run, run.config.train.seq_len)
    return sum(b.loss * b.tokens for b in buckets) / sum(b.tokens for b in buckets)


def curve_of(folders: list[Path], step_tokens: int) -> list[tuple[int, float]]:
    """Tokens and validation loss over all stages."""
    curve: list[tuple[int, float]] = []
    before = 0
    for folder in folders:
        found = validations(folder)
        curve += [(before + step * step_tokens, loss) for step, loss in found]
        before = curve[-1][0] if found else before
    return curve


def result_of(row: str, options: argparse.Namespace, code: int, curve: list[tuple[int, float]]) -> dict[str, Any]:
    return {
        "row": row,
        "changes": " ".join(learning.further_of(options)),
        "seq_len": options.seq_len,
        "dense_tokens": learning.steps_of(options) * options.seq_len * options.batch_size,
        "seed": options.seed,
        "lr": options.rate,
        "corpus": options.corpus,
        "exit_code": code,
        "tokens": curve[-1][0] if curve else 0,
        "val_loss": curve[-1][1] if curve and not code else None,
        "curve": curve,
        "runs_at_once": options.jobs,
    }


def key_of(result: dict[str, Any]) -> tuple[Any, ...]:
    names = ("row", "changes", "seq_len", "dense_tokens", "seed", "corpus")
    return *(result.get(name) for name in names), result.get("lr", RECALL_RATE if "recall" in result else RATE)


def run(work: Path, options: argparse.Namespace) -> None:
    rows = options.rows.split(",")
    if unknown := [row for row in rows if row not in (*ROWS, "dense")]:
        sys.exit(f"--rows: {unknown[0]!r} is not a row; the rows are dense, {', '.join(ROWS)}")
    results = Results(options.results, options.allow_dirty)
    options.corpus = learning.corpus_of(work, options.tokenizer)
    done = {key_of(r) for r in read_results(options.results) if r["exit_code"] == 0}
    is_lost = rows == ["dense"] and not is_finished(dense_folder(work, options))  # trained on another machine
    wanted = [row for row in rows if is_lost or key_of(result_of(row, options, 0, [])) not in done]
    failed = 0
    if "dense" in wanted:
        failed += learning.record(dense_run(work, options), results)
        wanted.remove("dense")
    if wanted:
        models = import_all(work, options)
        with learning.row_pool(options.jobs) as pool:
            running = [pool.submit(convert, row, models, options) for row in wanted]
            failed += sum(learning.record(finished.result(), results) for finished in as_completed(running))
    if failed:
        sys.exit(f"{failed} rows failed; their logs are in {work}")


def finished_rows(results: Path) -> dict[str, dict[str, Any]]:
    """The last result of every row that finished, of the dense model that the last row of all has, and converted with
    the same overrides; with the loss of that dense model."""
    found = [r for r in read_results(results) if r["exit_code"] == 0 and r["val_loss"] is not None]
    rows = {r["row"]: r for r in found if key_of(r)[1:] == key_of(found[-1])[1:]}
    kept = sorted(rows, key=["dense", *ROWS].index) if "dense" in rows else []
    return {row: rows[row] | {"dense_loss": rows["dense"]["val_loss"]} for row in kept}


def cells_of(r: dict[str, Any]) -> list[str]:
    losses = dict(map(tuple, r["curve"]))
    middle = (f"{losses[when]:.4f}" if when in losses else "" for when in (0, r.get("first_stage_tokens")))
    return [r["row"], f"{r['tokens'] / 1e6:.1f} million", *middle, f"{r['val_loss']:.4f}", against_dense(r), recall(r)]


def recall(r: dict[str, Any]) -> str:
    """Exact answers at the longest prompt, over all depths, of one key and of several, before and after."""

    def share(rows: list[dict[str, Any]]) -> str:
        longest = max(row["length"] for row in rows)
        means = [sum(row["by_depth"]) / len(row["by_depth"]) for row in rows if row["length"] == longest]
        return " / ".join(f"{100 * mean:.0f} %" for mean in means)

    return " → ".join(share(rows) for rows in r.get("recall", {}).values() if rows)


def against_dense(r: dict[str, Any]) -> str:
    return f"{r['val_loss'] / r['dense_loss'] - 1:+.1%}".replace("%", " %")


HEADER = ("row", "tokens", "loss at the start", "after the first stage", "at the end", "against dense")
HEADER += ("recall of one / several keys",)


def show(results: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*HEADER)
    for r in finished_rows(results).values():
        table.add_row(*cells_of(r))
    Console(width=120).print(table)


def section(results: Path, figure: Path, page: Path) -> str:
    """The section of the page about the results."""
    rows = finished_rows(results)
    if not rows:
        return "Not measured on a GPU yet.\n"
    any_row = next(iter(rows.values()))
    lines = [
        f"One H200, the model and text of [the learning study](learning.md), {any_row['seq_len']:,} tokens of context.",
        "A conversion takes at most a tenth of the dense model's tokens. Validation loss in nats per token",
        f"([{results.name}](../{results})):",
        "",
        f"| {' | '.join(HEADER)} |",
        "|---" * len(HEADER) + "|",
        *(f"| {' | '.join(cells_of(r))} |" for r in rows.values()),
        "",
        f"![validation loss against tokens of conversion]({figure.relative_to(page.parent)})",
    ]
    return "\n".join(lines) + "\n"


def write_page(results: Path, figure: Path, page: Path) -> None:
    """Replaces the text between the two marks, and draws the figure if there are results."""
    before, found, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, ends, after = rest.partition(MARKS[1])
    if not found or not ends:
        sys.exit(f"{page}: has no place for the results: a line {MARKS[0].strip()} and a line {MARKS[1].strip()}")
    page.write_text(before + MARKS[0] + section(results, figure, page) + MARKS[1] + after, encoding="utf-8")
    if finished_rows(results):
        plot(results, figure)


def plot(results: Path, figure: Path) -> None:
    with figures.figure(figure, 1, 1, salt="convert") as drawn:
        (axes,) = drawn.axes
        for row, r in finished_rows(results).items():
            if row == "dense":
                label = f"dense, after {r['tokens'] / 1e6:.0f} million tokens"
                axes.axhline(r["val_loss"], color=figures.NEUTRAL, lw=1.5, label=label)
                axes.axhline(1.02 * r["val_loss"], color=figures.NEUTRAL, ls=":", label="2 % above it")
                continue
            line = axes.plot([t / 1e6 for t, _ in r["curve"]], [loss for _, loss in r["curve"]], "o-", ms=4, label=row)
            if "first_stage_tokens" in r:
                axes.axvline(r["first_stage_tokens"] / 1e6, color=line[0].get_color(), lw=1, ls="--")
        axes.set(xlabel="million tokens of conversion", ylabel="validation loss")
        axes.legend()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.convert", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("run", "show", "page"))
    parser.add_argument("work", nargs="?", type=Path, default=Path("runs/learning"), help="as for bench.learning")
    parser.add_argument("--rows", default=",".join(["dense", *ROWS]), help="which of %(default)s")
    parser.add_argument("--tokenizer", choices=("bpe", "bytes"), default="bpe")
    parser.add_argument("--recall", action="store_true", help="convert the dense model of `bench.learning recall`")
    parser.add_argument("--tokens", type=int, help="of the dense model; default: 64 million, of recall 144 million")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, help="of the dense model; default: 8, of recall 2")
    parser.add_argument("--lengths", default="8192", help="of prompts, with --recall")
    parser.add_argument("--eval-tokens", type=int, default=EVAL_TOKENS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, help=f"of the dense model; default: {RATE:g}, of recall {RECALL_RATE:g}")
    parser.add_argument("--jobs", type=int, default=1, help="conversions at once on the GPU")
    parser.add_argument("--results", type=Path)
    parser.add_argument("override", nargs="*", help="further overrides of every run")
    add_dirty_option(parser)
    parser.set_defaults(tasks="pairs", corpus="")
    options = parser.parse_intermixed_args(arguments)
    options.tokens = options.tokens or (144_000_000 if options.recall else 64_000_000)
    options.batch_size = options.batch_size or (RECALL_BATCH if options.recall else BATCH)
    options.results = options.results or (RECALL_RESULTS if options.recall else RESULTS)
    options.rate = options.rate or (RECALL_RATE if options.recall else RATE)
    options.wanted, options.action = options.action, "recall" if options.recall else "run"
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.wanted == "run":
        run(options.work, options)
    elif options.wanted == "show":
        show(options.results)
    else:
        write_page(options.results, FIGURE, PAGE)


if __name__ == "__main__":
    main()
