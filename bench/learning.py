"""Compares what dense attention, NSA and its variants learn from the same tokens, with one run per row.

    python -m bench.learning prepare WORK                    # text, vocabulary and shards, from this machine's packages
    python -m bench.learning run WORK --rows dense,nsa       # trains rows that are not in the results yet
    python -m bench.learning recall WORK                     # a pattern and a window alone on text and recall documents
    python -m bench.learning show                            # the results as a table
    python -m bench.learning show --by rate                  # as a Markdown table with a column for each rate
    python -m bench.learning plot                            # the figures of docs/learning.md
    python -m bench.learning page                            # its tables of results, and its figures

Text is the source code and documentation of the installed Python packages. A document is a folder: its files of 4 KB
and more, each once in the whole corpus, after a line with their path, so that a long context helps. Runs use `nsa
train`, each in its own process and folder; a run that was stopped is resumed, a row that the results have for the same
corpus and overrides is not trained again. Rows differ only in the overrides of ROWS. `--tokenizer bytes` prepares and
trains on bytes instead of BPE tokens. `--evaluate` measures every trained row with `nsa eval --selection`: its loss by
position, and the attention mass of the selected blocks.

The corpus depends on the packages of the machine, and losses of different corpora cannot be compared: tables `--by` and
figures have only rows of the corpus that most rows name. `plot --results FILE --by position,seconds` draws other
results.

`recall` trains a smaller model on one quarter text and three quarters documents that ask for earlier values
(`data.source=recall`; `--tasks` names the kinds of documents), and measures recall by depth and length with `nsa eval`.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.learning_report import BY, FIGURES, PAGE, RESULTS, plot, show, write_page
from bench.learning_rows import RATE, RECALL_RATE, ROWS, key_of, read_results
from bench.output import Results, add_dirty_option
from nsa.config import load_config
from nsa.run_folder import TRAINING, read_rows

RECALL_RESULTS = Path("bench/results/recall-h200.jsonl")
CONFIG = "configs/m7c_125m.yaml"
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".cu", ".cpp", ".c", ".pyx", ".js", ".ts")
SMALLEST_FILE, LARGEST_FILE = 4 << 10, 512 << 10
LARGEST_DOCUMENT = 1 << 20
VOCABULARY = 16_384
BATCH, RECALL_BATCH = 8, 2
EVAL_TOKENS = 1 << 20
LONGEST_WITHOUT_VALIDATION = 1 << 25  # tokens
BASE = (
    "data.isolate_documents=true data.validation_fraction=0.02 data.workers=4 "
    "train.warmup_steps=100 train.weight_decay=0.1 train.grad_clip=1.0 train.schedule=cosine "
    "runtime.precision=bf16 runtime.compile=true checkpoint.every=500 checkpoint.keep=2 telemetry.tensorboard=false"
)
# Small enough for 144 million tokens in five minutes, deep enough to look a key up and copy what follows it. Steps are
# small, since it takes many to learn to match keys. The rotary base keeps 8,192 places apart.
RECALL = (
    "model.dim=512 model.n_layers=6 model.n_heads=8 model.n_kv_heads=2 model.mlp_dim=1408 model.rope_base=500000 "
    "train.optimizer=muon train.schedule=wsd train.min_lr_ratio=0.02"
)
RECALL_LENGTHS, RECALL_SAMPLES = "2048,4096,8192,32768", 100


def shards_of(work: Path, tokenizer: str) -> Path:
    return work / ("shards" if tokenizer == "bpe" else f"shards-{tokenizer}")


def tokenizer_of(work: Path, tokenizer: str) -> str:
    return str(work / "tokenizer.json") if tokenizer == "bpe" else tokenizer


def prepare(work: Path, max_mb: int, tokens: str) -> None:
    """Writes WORK/corpus, WORK/tokenizer.json and WORK/shards, or WORK/shards-bytes."""
    from nsa.data.vocabulary import train_bpe

    corpus = work / "corpus" / "packages.jsonl"
    if not corpus.exists():
        corpus.parent.mkdir(parents=True, exist_ok=True)
        size = count = 0
        beside = corpus.with_suffix(".part")
        with beside.open("w", encoding="utf-8") as file:
            for text in folders(Path(sysconfig.get_paths()["purelib"])):
                file.write(json.dumps({"text": text}) + "\n")
                size, count = size + len(text), count + 1
                if size > max_mb << 20:
                    break
        beside.replace(corpus)
        print(f"{corpus}: {count:,} documents, {size / 2**20:,.0f} MiB", flush=True)
    tokenizer = work / "tokenizer.json"
    if tokens == "bpe" and not tokenizer.exists():
        with corpus.open(encoding="utf-8") as file:
            # Every third document: a vocabulary needs less text than a model, and all of the corpus' kinds.
            texts = (json.loads(line)["text"] for number, line in enumerate(file) if number % 3 == 0)
            _, read = train_bpe(texts, tokenizer, vocab_size=VOCABULARY, max_bytes=128 << 20)
        print(f"{tokenizer}: {VOCABULARY:,} tokens from {read / 2**20:,.0f} MiB", flush=True)
    arguments = ["data.source=text", f"data.paths=[{corpus}]", f"data.tokenizer={tokenizer_of(work, tokens)}"]
    folder = str(shards_of(work, tokens))
    subprocess.run([sys.executable, "-m", "nsa", "data", "prepare", folder, *arguments], check=True)


def folders(root: Path) -> Iterator[str]:
    """Documents in an order that mixes packages and is the same every time."""
    found: dict[Path, list[Path]] = {}
    for base, _, names in os.walk(root):
        for name in names:
            path = Path(base, name)
            if path.suffix in SUFFIXES and not path.is_symlink():
                found.setdefault(Path(base), []).append(path)
    seen: set[bytes] = set()
    for folder in sorted(found, key=lambda path: hashlib.sha256(str(path.relative_to(root)).encode()).digest()):
        parts: list[str] = []
        size = 0
        for path in sorted(found[folder]):
            content = path.read_bytes() if SMALLEST_FILE <= path.stat().st_size <= LARGEST_FILE else b""
            digest = hashlib.sha256(content).digest()
            if not content or digest in seen:
                continue
            seen.add(digest)
            if size + len(content) > LARGEST_DOCUMENT:
                yield "\n".join(parts)
                parts, size = [], 0
            parts += [f"# {path.relative_to(root)}", content.decode("utf-8", "replace")]
            size += len(content)
        if parts:
            yield "\n".join(parts)


def corpus_of(work: Path, tokenizer: str) -> str:
    """Equal for the same tokens, wherever and whenever they were prepared: the text depends on the packages of the
    machine. The other entries of the manifest name paths and times."""
    shards = json.loads((shards_of(work, tokenizer) / "manifest.json").read_text())["shards"]
    hashes = [shard[name] for shard in shards for name in ("tokens_sha256", "docs_sha256")]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:12]


def data_of(work: Path, options: argparse.Namespace) -> list[str]:
    shards = shards_of(work, options.tokenizer)
    chosen = ["data.source=prepared", f"data.paths=[{shards}]"]
    if options.action == "recall":
        tasks = options.tasks.split(",")
        parts = [f"{{source: prepared, paths: [{shards}]}}"]
        parts += [f"{{source: recall, task: {task}, weight: {3 / len(tasks):g}}}" for task in tasks]
        chosen = [f"data.mixture=[{', '.join(parts)}]"]
    return [*chosen, f"data.tokenizer={tokenizer_of(work, options.tokenizer)}"]


def folder_of(work: Path, row: str, options: argparse.Namespace, seed: int, lr: float) -> Path:
    kind = "" if options.action == "run" else f"{options.action}-"
    kind += "" if options.tasks == "pairs" else f"{options.tasks.replace(',', '-')}-"
    kind += "" if options.tokenizer == "bpe" else f"{options.tokenizer}-"
    further = " ".join(further_of(options))
    mark = f"-{hashlib.sha256(further.encode()).hexdigest()[:8]}" if further else ""
    return work / "runs" / options.corpus / f"{kind}{row}-{options.seq_len}-{steps_of(options)}-s{seed}-lr{lr:g}{mark}"


def further_of(options: argparse.Namespace) -> list[str]:
    """What sets the runs of a command apart besides the names of rows: sizes that are not the default, overrides."""
    batch = RECALL_BATCH if options.action == "recall" else BATCH
    sizes = [f"train.batch_size={options.batch_size}"] if options.batch_size != batch else []
    sizes += [f"train.eval_sequences={eval_sequences(options)}"] if options.eval_tokens != EVAL_TOKENS else []
    return [*sizes, *options.override]


def eval_sequences(options: argparse.Namespace) -> int:
    return max(1, options.eval_tokens // options.seq_len)


def steps_of(options: argparse.Namespace) -> int:
    return -(-options.tokens // (options.seq_len * options.batch_size))


def overrides_of(work: Path, row: str, options: argparse.Namespace, seed: int, lr: float) -> list[str]:
    steps, step_tokens = steps_of(options), options.seq_len * options.batch_size
    return [
        *BASE.split(),
        *data_of(work, options),
        *(RECALL.split() if options.action == "recall" else []),
        *ROWS[row].split(),
        f"train.steps={steps}",
        f"train.seq_len={options.seq_len}",
        f"train.batch_size={options.batch_size}",
        f"train.eval_every={min(-(-steps // 4), -(-LONGEST_WITHOUT_VALIDATION // step_tokens))}",
        f"train.eval_sequences={eval_sequences(options)}",
        f"train.seed={seed}",
        f"train.lr={lr:g}",
        f"train.out_dir={folder_of(work, row, options, seed, lr)}",
        # Graphs take the memory that is free when a run starts, and another lacks it. The recall model is small.
        *(["runtime.cuda_graphs=false"] if options.jobs > 1 and options.action == "run" else []),
        *options.override,
    ]


def run_row(work: Path, row: str, options: argparse.Namespace, seed: int, lr: float) -> dict[str, Any]:
    folder = folder_of(work, row, options, seed, lr)
    measured: dict[str, Any] = {}
    log = work / f"{folder.name}.log"
    overrides = overrides_of(work, row, options, seed, lr)
    code = run_logged(["train", CONFIG, *overrides], log)
    if options.action == "recall" and code == 0:
        code, measured = evaluate(folder, options.lengths, log)
    elif options.evaluate and code == 0:
        selection = ["--selection"] if {*load_config(CONFIG, overrides).model.layer_kinds()} != {"window"} else []
        code, measured = evaluate(folder, options.lengths, log, *selection, samples=1)
        measured = {name: measured[name] for name in ("loss", "selection") if name in measured}
    metrics, about = read_json(folder / "metrics.json"), read_json(folder / "env.json")
    return {
        "row": row,
        "changes": " ".join([ROWS[row], *further_of(options)]).strip(),
        "tokenizer": options.tokenizer,
        "seq_len": options.seq_len,
        "tokens": steps_of(options) * options.seq_len * options.batch_size,
        "seed": seed,
        "lr": lr,
        "corpus": options.corpus,
        "exit_code": code,
        "val_loss": None if code else metrics.get("val_loss"),
        "val_bits_per_byte": None if code else metrics.get("val_bits_per_byte"),
        "parameters": about.get("parameters"),
        "flops_per_token": about.get("flops_per_token"),
        "curve": validations(folder),
        "step_seconds": None if options.jobs > 1 else step_seconds(folder),
        "runs_at_once": options.jobs,
        "reason": metrics.get("reason"),
        **({"tasks": options.tasks, "eval": measured} if measured else {}),
    }


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def evaluate(
    folder: Path, lengths: str, log: Path, *more: str, samples: int = RECALL_SAMPLES
) -> tuple[int, dict[str, Any]]:
    """The exit code of `nsa eval` and its measurements."""
    code = run_logged(["eval", str(folder), "--lengths", lengths, "--samples", str(samples), *more], log)
    measured = json.loads((folder / "eval.json").read_text()) if code == 0 else {}
    measured.pop("weights", None)
    return code, measured


def run_logged(arguments: list[str], log: Path) -> int:
    with log.open("a") as file:
        return subprocess.run(
            [sys.executable, "-m", "nsa", *arguments], stdout=file, stderr=subprocess.STDOUT
        ).returncode


def training_rows(folder: Path) -> list[dict[str, str]]:
    return read_rows(folder, TRAINING) if TRAINING.files.path(folder, 0).exists() else []


def validations(folder: Path) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row["val_loss"])) for row in training_rows(folder) if row["val_loss"]]


def step_seconds(folder: Path) -> float | None:
    """The median, which leaves out compilation, validation and checkpoints."""
    found = [float(row["step_s"]) for row in training_rows(folder) if row["step_s"]]
    return round(median(found), 6) if found else None


@contextmanager
def row_pool(jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that run rows. After an interrupt, rows that wait do not start."""
    with ThreadPoolExecutor(jobs) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def run(work: Path, options: argparse.Namespace) -> None:
    unknown = [row for row in options.rows.split(",") if row not in ROWS]
    if unknown:
        sys.exit(f"--rows: {unknown[0]!r} is not a row; the rows are {', '.join(ROWS)}")
    results = Results(options.results, options.allow_dirty)
    tokens, given = steps_of(options) * options.seq_len * options.batch_size, " ".join(further_of(options))
    options.corpus = corpus_of(work, options.tokenizer)
    done = {key_of(r) for r in read_results(options.results) if r["exit_code"] == 0}
    wanted = [
        (row, seed, lr)
        for seed in (int(seed) for seed in options.seeds.split(","))
        for lr in (float(lr) for lr in options.rates.split(","))
        for row in options.rows.split(",")
        if (row, options.tokenizer, options.seq_len, tokens, seed, lr, options.tasks, options.corpus, given) not in done
    ]
    with row_pool(options.jobs) as pool:
        running = [pool.submit(run_row, work, row, options, seed, lr) for row, seed, lr in wanted]
        failed = sum(record(finished.result(), results) for finished in as_completed(running))
    if failed:
        sys.exit(f"{failed} of {len(wanted)} rows failed; their logs are in {work}")


def record(result: dict[str, Any], results: Results) -> bool:
    """True if the row failed."""
    results.append(result)
    ended = f"exit code {result['exit_code']}" if result["exit_code"] else result["val_loss"]
    print(f"{result['row']}, seed {result['seed']}, rate {result['lr']:g}: {ended}", flush=True)
    return result["exit_code"] != 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.learning", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("prepare", "run", "recall", "show", "plot", "page"))
    parser.add_argument("work", nargs="?", type=Path, default=Path("runs/learning"), help="folder of text and runs")
    parser.add_argument("--rows", help="default: dense,nsa,pattern-1-3,pattern-1-1; recall: pattern-1-1,window")
    parser.add_argument("--tokenizer", choices=("bpe", "bytes"), default="bpe")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--rates", help="learning rates to train every row with, separated by commas")
    parser.add_argument("--tokens", type=int, help="default: 60 million; recall: 144 million")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, help="default: 8; recall: 2, since it takes steps more than tokens")
    parser.add_argument("--eval-tokens", type=int, default=EVAL_TOKENS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once on the GPU; their speed is then shared")
    parser.add_argument("--max-mb", type=int, default=400, help="text to collect")
    parser.add_argument("--evaluate", action="store_true", help="run: measure every row with `nsa eval --selection`")
    parser.add_argument("--lengths", help=f"of evaluations; default: --seq-len, recall: {RECALL_LENGTHS}")
    parser.add_argument("--tasks", default="pairs", help="recall: pairs, tracking, counting, or several with commas")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--by", help=f"show and plot: {', '.join(BY)}; plot: several with commas, default: tokens")
    parser.add_argument("--figure", type=Path, help="plot: default: beside --results")
    parser.add_argument("override", nargs="*", help="further overrides of every row")
    add_dirty_option(parser)
    parser.set_defaults(corpus="")
    options = parser.parse_intermixed_args(arguments)
    is_recall = options.action == "recall"
    options.rows = options.rows or ("pattern-1-1,window" if is_recall else "dense,nsa,pattern-1-3,pattern-1-1")
    options.tokens = options.tokens or (144_000_000 if is_recall else 60_000_000)
    options.batch_size = options.batch_size or (RECALL_BATCH if is_recall else BATCH)
    options.rates = options.rates or f"{RECALL_RATE if is_recall else RATE}"
    options.lengths = options.lengths or (RECALL_LENGTHS if is_recall else f"{options.seq_len}")
    if unknown := [way for way in (options.by or "tokens").split(",") if way not in BY]:
        parser.error(f"--by: {unknown[0]!r} is none of {', '.join(BY)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.action == "prepare":
        prepare(options.work, options.max_mb, options.tokenizer)
    elif options.action == "show":
        show(options.results or RESULTS, options.by)
    elif options.action == "plot" and options.results:
        if not plot(options.results, options.by or "tokens", options.figure or options.results.with_suffix(".svg")):
            sys.exit(f"{options.results}: no row to draw")
    elif options.action in ("plot", "page"):
        if options.action == "page":
            write_page(PAGE)
        for figure, (results, by) in FIGURES.items():
            plot(results, by, figure)
    else:
        options.results = options.results or (RECALL_RESULTS if options.action == "recall" else RESULTS)
        run(options.work, options)


if __name__ == "__main__":
    main()
