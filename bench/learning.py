"""What attention learns from the same tokens: dense against NSA and its variants, one run a row.

    python -m bench.learning prepare WORK                    # text, vocabulary and shards, from this machine's packages
    python -m bench.learning run WORK --rows dense,nsa       # trains what is not in the results yet
    python -m bench.learning show                            # the results as a table

Text is the source code and documentation of the installed Python packages. A document is a folder: its files of 4 KB
and more, each once in the whole corpus, behind a line with their path, so that a long context pays. Runs are the
trainer's own (`nsa train`), each in its own process and folder; a run that was stopped goes on, a row that is in the
results is not trained again. Rows differ in the overrides of ROWS and in nothing else.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

RESULTS = Path("bench/results/learning-h200.jsonl")
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".cu", ".cpp", ".c", ".pyx", ".js", ".ts")
SMALLEST_FILE, LARGEST_FILE = 4 << 10, 512 << 10
LARGEST_DOCUMENT = 1 << 20
VOCABULARY = 16_384
BASE = (
    "data.source=prepared data.isolate_documents=true data.validation_fraction=0.02 data.workers=4 "
    "train.lr=6e-4 train.warmup_steps=100 train.weight_decay=0.1 train.grad_clip=1.0 train.schedule=cosine "
    "runtime.precision=bf16 runtime.compile=true checkpoint.every=100 checkpoint.keep=2 telemetry.tensorboard=false"
)
# `dense` and `nsa` are the comparison; each of the others changes one thing, or adds norms to a pattern.
ROWS: dict[str, str] = {
    "dense": "model.attention=dense",
    "nsa": "",
    "pattern-1-3": "model.layer_pattern=[dense,nsa,nsa,nsa]",
    "pattern-1-1": "model.layer_pattern=[nsa,dense]",
    "pattern-3-1": "model.layer_pattern=[nsa,nsa,nsa,dense]",
    "window": "model.layer_pattern=[window]",
    "window-dense": "model.layer_pattern=[window,window,window,dense]",
    "dense-norm": "model.attention=dense model.qk_norm=true",
    "nsa-norm": "model.qk_norm=true",
    "nsa-32": "nsa.num_selected=32",
    "nsa-mlp": "nsa.phi=mlp",
    "nsa-softmax": "nsa.gate=softmax",
    "nsa-block-16": "nsa.cmp_block=16 nsa.cmp_stride=8 nsa.sel_block=32 nsa.num_selected=32",
    "nsa-4-groups": "model.n_kv_heads=4",
    "dense-4-groups": "model.attention=dense model.n_kv_heads=4",
    "pattern-1-3-norm": "model.layer_pattern=[dense,nsa,nsa,nsa] model.qk_norm=true",
    "pattern-1-1-norm": "model.layer_pattern=[nsa,dense] model.qk_norm=true",
}


def prepare(work: Path, max_mb: int) -> None:
    """Writes WORK/corpus, WORK/tokenizer.json and WORK/shards."""
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
    if not tokenizer.exists():
        with corpus.open(encoding="utf-8") as file:
            # Every third document: a vocabulary needs less text than a model, and all of the corpus' kinds.
            texts = (json.loads(line)["text"] for number, line in enumerate(file) if number % 3 == 0)
            _, read = train_bpe(texts, tokenizer, vocab_size=VOCABULARY, max_bytes=128 << 20)
        print(f"{tokenizer}: {VOCABULARY:,} tokens from {read / 2**20:,.0f} MiB", flush=True)
    arguments = ["data.source=text", f"data.paths=[{corpus}]", f"data.tokenizer={tokenizer}"]
    subprocess.run([sys.executable, "-m", "nsa", "data", "prepare", str(work / "shards"), *arguments], check=True)


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


def run_row(work: Path, row: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    steps = -(-options.tokens // (options.seq_len * options.batch_size))
    folder = work / "runs" / f"{row}-{options.seq_len}-{steps}-s{seed}"
    overrides = [
        *BASE.split(),
        *ROWS[row].split(),
        f"data.paths=[{work / 'shards'}]",
        f"data.tokenizer={work / 'tokenizer.json'}",
        f"train.steps={steps}",
        f"train.seq_len={options.seq_len}",
        f"train.batch_size={options.batch_size}",
        f"train.eval_every={max(1, steps // 4)}",
        f"train.eval_sequences={max(1, options.eval_tokens // options.seq_len)}",
        f"train.seed={seed}",
        f"train.out_dir={folder}",
        *options.override,
    ]
    began = time.time()
    command = [sys.executable, "-m", "nsa", "train", "configs/m7c_125m.yaml", *overrides]
    with (work / f"{folder.name}.log").open("a") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    metrics = json.loads((folder / "metrics.json").read_text()) if (folder / "metrics.json").exists() else {}
    return {
        "row": row,
        "changes": " ".join([ROWS[row], *options.override]).strip(),
        "seq_len": options.seq_len,
        "tokens": steps * options.seq_len * options.batch_size,
        "seed": seed,
        "exit_code": code,
        "val_loss": metrics.get("val_loss"),
        "val_bits_per_byte": metrics.get("val_bits_per_byte"),
        "curve": validations(folder),
        "seconds": round(time.time() - began, 1),
        "runs_at_once": options.jobs,
        "reason": metrics.get("reason"),
    }


def validations(folder: Path) -> list[tuple[int, float]]:
    path = folder / "training.csv"
    if not path.exists():
        return []
    header, *lines = path.read_text().splitlines()
    step, loss = (header.split(",").index(name) for name in ("step", "val_loss"))
    rows = (line.split(",") for line in lines)
    return [(int(cells[step]), float(cells[loss])) for cells in rows if len(cells) > loss and cells[loss]]


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(work: Path, options: argparse.Namespace) -> None:
    unknown = [row for row in options.rows.split(",") if row not in ROWS]
    if unknown:
        sys.exit(f"--rows: {unknown[0]!r} is no row; there are {', '.join(ROWS)}")
    steps = -(-options.tokens // (options.seq_len * options.batch_size))
    tokens = steps * options.seq_len * options.batch_size
    done = {
        (r["row"], r["seq_len"], r["tokens"], r["seed"]) for r in read_results(options.results) if r["exit_code"] == 0
    }
    wanted = [
        (row, seed)
        for seed in (int(seed) for seed in options.seeds.split(","))
        for row in options.rows.split(",")
        if (row, options.seq_len, tokens, seed) not in done
    ]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(run_row, work, row, options, seed) for row, seed in wanted]
        for finished in as_completed(running):
            result = finished.result()
            with options.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(
                f"{result['row']} seed {result['seed']}: {result['val_loss']} after {result['seconds']} s", flush=True
            )


def show(results: Path) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("row", "changes", "context", "tokens", "seed", "val loss", "against dense")
    found = [r for r in read_results(results) if r["val_loss"] is not None]
    dense = {(r["seq_len"], r["tokens"], r["seed"]): r["val_loss"] for r in found if r["row"] == "dense"}
    for r in found:
        base = dense.get((r["seq_len"], r["tokens"], r["seed"]))
        ratio = f"{r['val_loss'] / base - 1:+.2%}" if base else "-"
        million = f"{r['tokens'] / 1e6:.0f}M"
        table.add_row(
            r["row"], escape(r["changes"]), str(r["seq_len"]), million, str(r["seed"]), f"{r['val_loss']:.4f}", ratio
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.learning", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("prepare", "run", "show"))
    parser.add_argument("work", nargs="?", type=Path, default=Path("runs/learning"), help="folder of text and runs")
    parser.add_argument("--rows", default="dense,nsa,pattern-1-3,pattern-1-1")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--tokens", type=int, default=60_000_000)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--eval-tokens", type=int, default=1 << 20)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once on the GPU; their speed is then shared")
    parser.add_argument("--max-mb", type=int, default=400, help="text to collect")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("override", nargs="*", help="further overrides of every row")
    options = parser.parse_intermixed_args()
    if options.action == "prepare":
        prepare(options.work, options.max_mb)
    elif options.action == "run":
        run(options.work, options)
    else:
        show(options.results)


if __name__ == "__main__":
    main()
