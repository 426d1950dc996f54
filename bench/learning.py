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
import re
import subprocess
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import fmean, median
from textwrap import fill, wrap
from typing import Any, NamedTuple

from bench import figures
from bench.output import Results, add_dirty_option
from nsa.config import load_config
from nsa.run_folder import HEARTBEAT, TRAINING, read_events, read_rows

RESULTS = Path("bench/results/learning-h200.jsonl")
RATES_RESULTS = Path("bench/results/learning-rates-h200.jsonl")
RECALL_RESULTS = Path("bench/results/recall-h200.jsonl")
# The figures of the guide: their results, and what they show.
FIGURES = {
    Path("docs/img/learning.svg"): (RESULTS, "tokens"),
    Path("docs/img/learning-rates.svg"): (RATES_RESULTS, "rate"),
    Path("docs/img/learning-32k.svg"): (Path("bench/results/learning-32k-h200.jsonl"), "position,seconds"),
}
PAGE = Path("docs/learning.md")
CONFIG = "configs/m7c_125m.yaml"
MARKS = re.compile(r"(<!-- bench\.learning show --by (\w+) --results (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".cu", ".cpp", ".c", ".pyx", ".js", ".ts")
SMALLEST_FILE, LARGEST_FILE = 4 << 10, 512 << 10
LARGEST_DOCUMENT = 1 << 20
VOCABULARY = 16_384
RATE, RECALL_RATE = 6e-4, 1e-3
BATCH, RECALL_BATCH = 8, 2
EVAL_TOKENS = 1 << 20
BASE = (
    "data.isolate_documents=true data.validation_fraction=0.02 data.workers=4 "
    "train.warmup_steps=100 train.weight_decay=0.1 train.grad_clip=1.0 train.schedule=cosine "
    "runtime.precision=bf16 runtime.compile=true checkpoint.every=500 checkpoint.keep=2 telemetry.tensorboard=false"
)
# `dense` and `nsa` are the comparison; each of the others changes one thing, or adds norms to a pattern.
ROWS: dict[str, str] = {
    "dense": "model.attention=dense",
    "dense-wide": "model.attention=dense model.mlp_dim=2256",  # 0.1 % more parameters than nsa
    "nsa": "",
    "msa": "model.attention=msa",
    "pattern-1-3": "model.layer_pattern=[dense,nsa,nsa,nsa]",
    "pattern-1-1": "model.layer_pattern=[nsa,dense]",
    "pattern-3-1": "model.layer_pattern=[nsa,nsa,nsa,dense]",
    "window": "model.layer_pattern=[window]",
    "window-dense": "model.layer_pattern=[window,window,window,dense]",
    "nsa-mean-mlp": "nsa.phi=mean_mlp",
    "nsa-after-rotation": "nsa.compress=after_rotation",
    "dense-muon": "model.attention=dense train.optimizer=muon",
    "nsa-muon": "train.optimizer=muon",
    "msa-muon": "model.attention=msa train.optimizer=muon",
    "msa-norm": "model.attention=msa model.qk_norm=true",
    "dense-norm": "model.attention=dense model.qk_norm=true",
    "nsa-norm": "model.qk_norm=true",
    "nsa-tensorwise": "runtime.float8=tensorwise",
    "nsa-rowwise": "runtime.float8=rowwise",
    "nsa-32": "nsa.num_selected=32",
    "nsa-mlp": "nsa.phi=mlp",
    "nsa-softmax": "nsa.gate=softmax",
    "nsa-block-16": "nsa.cmp_block=16 nsa.cmp_stride=8 nsa.sel_block=32 nsa.num_selected=32",
    "nsa-shared": "nsa.shared_kv=true",
    "nsa-shared-16": "nsa.shared_kv=true nsa.cmp_block=16 nsa.cmp_stride=8 nsa.sel_block=32 nsa.num_selected=32",
    "nsa-4-groups": "model.n_kv_heads=4",
    "dense-4-groups": "model.attention=dense model.n_kv_heads=4",
    "pattern-1-3-norm": "model.layer_pattern=[dense,nsa,nsa,nsa] model.qk_norm=true",
    "pattern-1-1-norm": "model.layer_pattern=[nsa,dense] model.qk_norm=true",
}
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
    return work / "runs" / f"{kind}{row}-{options.seq_len}-{steps_of(options)}-s{seed}-lr{lr:g}{mark}"


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
    steps = steps_of(options)
    return [
        *BASE.split(),
        *data_of(work, options),
        *(RECALL.split() if options.action == "recall" else []),
        *ROWS[row].split(),
        f"train.steps={steps}",
        f"train.seq_len={options.seq_len}",
        f"train.batch_size={options.batch_size}",
        f"train.eval_every={max(1, steps // 4)}",
        f"train.eval_sequences={eval_sequences(options)}",
        f"train.seed={seed}",
        f"train.lr={lr:g}",
        f"train.out_dir={folder_of(work, row, options, seed, lr)}",
        # Graphs take the memory that is free when a run starts, and another run then lacks it.
        *(["runtime.cuda_graphs=false"] if options.jobs > 1 else []),
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
        "corpus": corpus_of(work, options.tokenizer),
        "exit_code": code,
        "val_loss": None if code else metrics.get("val_loss"),
        "val_bits_per_byte": None if code else metrics.get("val_bits_per_byte"),
        "parameters": about.get("parameters"),
        "flops_per_token": about.get("flops_per_token"),
        "curve": validations(folder),
        "seconds": seconds_of(folder),
        "step_seconds": step_seconds(folder),
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


def seconds_of(folder: Path) -> float:
    """The duration of a run over all its starts, each from its boot to its last event."""
    clocks: list[list[float]] = []
    for event in read_events(folder) if HEARTBEAT.path(folder, 0).exists() else ():
        if event["event"] == "boot" or not clocks:
            clocks.append([])
        clocks[-1].append(event["clock"])
    return round(sum(start[-1] - start[0] for start in clocks), 1)


def training_rows(folder: Path) -> list[dict[str, str]]:
    return read_rows(folder, TRAINING) if TRAINING.files.path(folder, 0).exists() else []


def validations(folder: Path) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row["val_loss"])) for row in training_rows(folder) if row["val_loss"]]


def step_seconds(folder: Path) -> float | None:
    """The median, which leaves out compilation, validation and checkpoints."""
    found = [float(row["step_s"]) for row in training_rows(folder) if row["step_s"]]
    return round(median(found), 6) if found else None


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key_of(result: dict[str, Any]) -> tuple[Any, ...]:
    lr = result.get("lr", RECALL_RATE if "eval" in result else RATE)
    sizes = (result[name] for name in ("seq_len", "tokens", "seed"))
    return (
        result["row"],
        result.get("tokenizer", "bpe"),
        *sizes,
        lr,
        result.get("tasks", "pairs"),
        result.get("corpus"),
        further(result),
    )


def further(result: dict[str, Any]) -> str:
    return result["changes"].removeprefix(ROWS.get(result["row"], "")).strip()


def own_and_shared(result: dict[str, Any]) -> tuple[str, str]:
    """The further overrides that dense attention cannot have, and the others that may change what a model learns."""
    given = [o for o in further(result).split() if not o.startswith(("checkpoint.", "telemetry."))]
    own = [o for o in given if o.startswith(("nsa.", "msa."))]
    return " ".join(own), " ".join(o for o in given if o not in own)


def compared_with(result: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for the rows that can be compared with each other."""
    return (*key_of(result)[1:-1], own_and_shared(result)[1])


def run(work: Path, options: argparse.Namespace) -> None:
    unknown = [row for row in options.rows.split(",") if row not in ROWS]
    if unknown:
        sys.exit(f"--rows: {unknown[0]!r} is not a row; the rows are {', '.join(ROWS)}")
    results = Results(options.results, options.allow_dirty)
    tokens, corpus = steps_of(options) * options.seq_len * options.batch_size, corpus_of(work, options.tokenizer)
    given = " ".join(further_of(options))
    done = {key_of(r) for r in read_results(options.results) if r["exit_code"] == 0}
    wanted = [
        (row, seed, lr)
        for seed in (int(seed) for seed in options.seeds.split(","))
        for lr in (float(lr) for lr in options.rates.split(","))
        for row in options.rows.split(",")
        if (row, options.tokenizer, options.seq_len, tokens, seed, lr, options.tasks, corpus, given) not in done
    ]
    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(run_row, work, row, options, seed, lr) for row, seed, lr in wanted]
        for finished in as_completed(running):
            result = finished.result()
            results.append(result)
            ended = f"exit code {result['exit_code']}" if result["exit_code"] else result["val_loss"]
            name = f"{result['row']}, seed {result['seed']}, rate {result['lr']:g}"
            print(f"{name}: {ended} after {result['seconds']} s", flush=True)
            failed += result["exit_code"] != 0
    if failed:
        sys.exit(f"{failed} of {len(wanted)} rows failed; their logs are in {work}")


def show(results: Path, by: str | None) -> None:
    if by:
        print(tables_by(results, by))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("row", "changes", "tokenizer", "context", "tokens", "seed", "rate", "val loss", "against dense")
    found = [r for r in read_results(results) if r["exit_code"] == 0]
    dense = {compared_with(r): r["val_loss"] for r in found if r["row"] == "dense"}
    for r in found:
        row, tokenizer, seq_len, tokens, seed, lr, *_ = key_of(r)
        base = dense.get(compared_with(r))
        cells = (tokenizer, str(seq_len), f"{tokens / 1e6:.0f}M", str(seed), f"{lr:g}", f"{r['val_loss']:.4f}")
        table.add_row(row, escape(r["changes"]), *cells, f"{r['val_loss'] / base - 1:+.2%}" if base else "-")
    console = Console(width=140)
    console.print(table)
    for r in found:
        for measured in r.get("eval", {}).get("recall", []):
            shares = " ".join(f"{100 * share:5.1f}" for share in measured["by_depth"])
            console.print(
                f"{r['row']}, {measured['keys']}, {measured['length']:6,} tokens, exact in % by depth: {shares}"
            )
        for measured in r.get("eval", {}).get("tasks", []):
            shares = " ".join(
                f"{level}: {100 * share:.1f}"
                for level, share in zip(measured["levels"], measured["by_level"], strict=True)
            )
            about = f"{measured['task']}, {measured['length']:6,} tokens, exact in % by {measured['unit']}"
            console.print(f"{r['row']}, {about}: {shares}")


Points = list[tuple[float, float]]


def along_curve(r: dict[str, Any], per_step: float) -> Points:
    return [(step * per_step, loss) for step, loss in r["curve"]]


def by_position(r: dict[str, Any]) -> Points:
    """At the length of training, by the fewest tokens of context in a bucket."""
    losses = {measured["length"]: measured["buckets"] for measured in r.get("eval", {}).get("loss", [])}
    return [(bucket["first"], bucket["loss"]) for bucket in losses.get(r["seq_len"], [])]


def by_layer(r: dict[str, Any]) -> Points:
    masses = {measured["length"]: measured["layers"] for measured in r.get("eval", {}).get("selection", [])}
    return [(int(layer["layer"].split(".")[1]), layer["mass"]) for layer in masses.get(r["seq_len"], [])]


# What a run can be shown by: the axes and its points. Runs that shared a GPU have no seconds.
BY: dict[str, tuple[str, str, Callable[[dict[str, Any]], Points]]] = {
    "rate": ("learning rate", "validation loss", lambda r: [(r["lr"], r["val_loss"])]),
    "seed": ("seed", "validation loss", lambda r: [(r["seed"], r["val_loss"])]),
    "tokens": (
        "million tokens",
        "validation loss",
        lambda r: along_curve(r, r["tokens"] / r["curve"][-1][0] / 1e6),
    ),
    "seconds": (
        "seconds in training steps",
        "validation loss",
        lambda r: along_curve(r, r["step_seconds"]) if r["runs_at_once"] == 1 and r.get("step_seconds") else [],
    ),
    "position": ("tokens of context", "loss", by_position),
    "layer": ("layer", "attention mass of the selected blocks", by_layer),
}


def comparable(results: Path) -> list[dict[str, Any]]:
    """The last result of every finished run on the corpus that most of them name, for each tokenizer."""
    found = [r for r in read_results(results) if r["exit_code"] == 0 and r["curve"]]
    counts = Counter((key_of(r)[1], r.get("corpus", "unknown")) for r in found)
    chosen = dict(reversed([kind for kind, _ in counts.most_common() if kind[1] != "unknown"]))
    for (tokenizer, corpus), count in counts.items():
        is_left_out = chosen.get(tokenizer) != corpus
        print(f"{results}: {count} rows, {tokenizer}, corpus {corpus}{': left out' if is_left_out else ''}")
    kept = {key_of(r): r for r in found if "corpus" in r and r["corpus"] == chosen[key_of(r)[1]]}
    return sorted(kept.values(), key=lambda r: (list(ROWS).index(r["row"]), r["lr"], r["seed"]))


class Line(NamedTuple):
    """A line of a table or figure. `lr` or `seed` is None in one by rate or by seed."""

    row: str
    changes: str
    lr: float | None
    seed: int | None

    def __str__(self) -> str:
        rate = "" if self.lr is None else f"rate {self.lr:g}"
        return ", ".join(filter(None, (self.row, self.changes, rate, f"seed {self.seed}" if self.seed else "")))

    def kind(self) -> tuple[str, bool]:
        """The row without its optimizer, and whether that is Muon."""
        return self.row.removesuffix("-muon"), self.row.endswith("-muon")


Lines = dict[Line, dict[float, float]]


def lines_by(found: list[dict[str, Any]], by: str) -> dict[tuple[Any, ...], Lines]:
    """For each tokenizer, context, number of tokens and further overrides: the lines of a table or panel, each with its
    points."""
    groups: dict[tuple[Any, ...], Lines] = {}
    for r in found:
        own, shared = own_and_shared(r)
        line = Line(r["row"], own, None if by == "rate" else r["lr"], None if by == "seed" else r["seed"])
        if points := BY[by][2](r):
            groups.setdefault((*key_of(r)[1:4], shared), {}).setdefault(line, {}).update(points)
    return dict(sorted(groups.items()))


def against_dense(line: Line, lines: Lines, by: str) -> str:
    """Compares the lowest losses over the rates with the same seed, or the means over the seeds that both lines have,
    with dense attention with the same optimizer, at the rate where it is best."""
    points, ratios = lines[line], list[float]()
    for other, dense in lines.items():
        shared = points.keys() & dense.keys()
        if other.kind() != ("dense", line.kind()[1]):
            continue
        if by == "rate" and other.seed == line.seed:
            ratios.append(min(points.values()) / min(dense.values()))
        elif by == "seed" and shared:
            ratios.append(fmean(points[x] for x in shared) / fmean(dense[x] for x in shared))
    return f"{max(ratios) - 1:+.1%}".replace("%", " %") if ratios else ""


def tables_by(results: Path, by: str) -> str:
    """Markdown, with a summary of each row by rate and by seed."""
    titles = {"rate": ["lowest"], "seed": ["mean", "lowest to highest"]}.get(by, [])
    text: list[str] = []
    for (tokenizer, seq_len, tokens, shared), lines in lines_by(comparable(results), by).items():
        columns = sorted({x for points in lines.values() for x in points})
        header = ["row", *(f"{x:g}" for x in columns), *titles, *(["against dense"] if titles else [])]
        about = [tokenizer, f"{seq_len:,} tokens of context", f"{tokens / 1e6:.0f} million tokens", shared]
        text += ["", f"{', '.join(filter(None, about))}, by {BY[by][0]}:", ""]
        text += [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        for line, points in lines.items():
            low, high = min(points.values()), max(points.values())
            summary = {"lowest": f"{low:.4f}", "mean": f"{fmean(points.values()):.4f}"}
            summary["lowest to highest"] = f"{low:.4f} to {high:.4f}" if len(points) > 1 else ""
            cells = [f"{points[x]:.4f}" if x in points else "" for x in columns] + [summary[title] for title in titles]
            cells += [against_dense(line, lines, by)] if titles else []
            text.append(f"| {' | '.join([str(line), *cells])} |")
    return "\n".join([*text, "", ""])


def write_page(page: Path) -> None:
    """Replaces the tables between the marks of a page. A mark names the command that shows them."""
    made = MARKS.sub(lambda found: found[1] + tables_by(Path(found[3]), found[2]) + found[4], page.read_text("utf-8"))
    page.write_text(made, encoding="utf-8")


def plot(results: Path, by: str, figure: Path) -> bool:
    """A panel for each way of showing, tokenizer, context and length of run. False if there is nothing to draw."""
    found = comparable(results)
    panels = [(way, *panel) for way in by.split(",") for panel in lines_by(found, way).items()]
    if not panels:
        return False
    columns = min(2, len(panels))
    with figures.figure(figure, -(-len(panels) // columns), columns, salt="learning") as drawn:
        for axes, (way, (tokenizer, seq_len, tokens, shared), lines) in zip(drawn.axes, panels, strict=False):
            others = cycle(figures.COLOURS[2:])
            colours = {"dense": figures.NEUTRAL, "nsa": figures.COLOURS[0], "msa": figures.COLOURS[1]}
            colours = defaultdict(partial(next, others), colours)
            markers = defaultdict(lambda: cycle("osD^vPX*"))  # the lines of a kind differ in these
            for line, points in lines.items():
                kind, is_muon = line.kind()
                style = {"color": colours[kind], "ls": "--" if is_muon else "-", "marker": next(markers[kind, is_muon])}
                axes.plot(list(points), list(points.values()), ms=5, **style, label=fill(str(line), 40))
            if way in ("rate", "position"):
                axes.set_xscale("log", base=10 if way == "rate" else 2)
                ticks = sorted({x for points in lines.values() for x in points})[:: 1 if way == "rate" else 3]
                axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
                axes.minorticks_off()
            title = f"{tokenizer}, {seq_len:,} tokens of context\n{tokens / 1e6:.0f} million tokens"
            axes.set(title="\n".join([title, *wrap(shared, 40)]))
            axes.set(xlabel=BY[way][0], ylabel=BY[way][1])
            axes.legend(**({"loc": "upper left", "bbox_to_anchor": (1, 1)} if len(lines) > 6 else {}))
        for axes in drawn.axes[len(panels) :]:
            axes.remove()
    print(f"{figure}: {figure.stat().st_size:,} bytes")
    return True


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
