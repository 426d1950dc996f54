"""`nsa generate`."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa.cli.arguments import JoinedOverrides, TrainedModel, all_overrides, overrides_such_as
from nsa.cli.output import say
from nsa.errors import ConfigError, reworded
from nsa.formatting import counted

if TYPE_CHECKING:
    from nsa.generate.stream import Generated
    from nsa.train.trained import TrainedRun


def generate(
    source: TrainedModel,
    overrides: Annotated[list[str] | None, overrides_such_as("runtime.device=cpu")] = None,
    override: JoinedOverrides = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Text to continue; may be given several times. Without a prompt, a new document begins.",
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="More prompts, one per line; empty lines are skipped.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are messages of a user, which the run's chat template renders.")
    ] = False,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, max=2**31 - 1, help="Maximum of new tokens per prompt.")
    ] = 200,
    temperature: Annotated[
        float, typer.Option(metavar="T", min=0.0, help="0 always takes the most likely token.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(metavar="K", min=1, help="Sample from the k most likely tokens only.")
    ] = None,
    top_p: Annotated[
        float, typer.Option(metavar="P", help="Sample from the most likely tokens of total probability P.")
    ] = 0.95,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**63 - 1, help="The same seed gives the same text.")
    ] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; may be given several times.")
    ] = None,
    beside_untrained: Annotated[
        bool, typer.Option("--beside-untrained", help="First show the output of the untrained model.")
    ] = False,
) -> None:
    """Generate text with a trained model. All prompts form one batch, and text is printed as it is generated. The
    run's samples.jsonl, which the report shows, records it."""
    if not 0.0 < top_p <= 1.0:
        raise ConfigError(f"--top-p: must be above 0 and at most 1, got {top_p}; 1 draws from all tokens")
    if "" in (stop or []):
        raise ConfigError("--stop: must not be empty; leave it out to write up to --max-tokens")
    prompts = [*(prompt or []), *(_read_prompts(prompt_file) if prompt_file else [])] or [""]

    from dataclasses import replace

    from nsa import load_run
    from nsa.nn.model import build_model
    from nsa.parallel.numerics import numerics
    from nsa.record.samples import record_samples

    run = load_run(source, overrides=all_overrides(overrides, override))
    config = run.config
    ids = _as_messages(run, prompts) if chat else None
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    options |= {"seed": seed} | ({"stop": stop} if stop else {})
    settings = options | ({"chat": True} if chat else {})
    with numerics(config.runtime):
        if beside_untrained:
            untrained = build_model(config, run.model.vocab_size, config.train.seed)
            print("--- before training ---")
            _write(replace(run, model=untrained.to(run.model.head.weight.device).eval()), prompts, ids, options)
            print("\n--- after training ---")
        texts = _write(run, prompts, ids, options)
        if beside_untrained:
            print()
    record_samples(run.weights, prompts, texts, **settings)


def _as_messages(run: "TrainedRun", prompts: list[str]) -> list[list[int]]:
    """Returns the tokens of conversations that begin with each prompt, up to the answer."""
    with closing(run.chat_tokenizer()) as tokenizer:
        return [tokenizer.prompt([{"role": "user", "content": text}]) for text in prompts]


def _write(run: "TrainedRun", prompts: list[str], ids: list[list[int]] | None, options: dict[str, Any]) -> list[str]:
    """Prints the generated text, and the speed to standard error. Returns the text after each prompt. `ids` are the
    tokens of the prompts in place of their texts, which are then printed on a line of their own."""
    from nsa import generate_tokens
    from nsa.train.trained import in_compute_type

    # A separator precedes a text.
    lengths = list(map(len, ids)) if ids else [len(run.tokenizer.encode(text)) + 1 for text in prompts]
    trained = run.config.train.seq_len
    if max(lengths) > trained:
        said = f"a prompt of {max(lengths)} tokens is longer than the {trained} that the model was trained on"
        print(f"note: {said} (train.seq_len); the text may be worse", file=sys.stderr)
    started = time.perf_counter()
    tokens = generate_tokens(in_compute_type(run), ids or prompts, **options)
    read = time.perf_counter()
    count, texts = _print_stream(tokens, [f"{text}\n" for text in prompts] if ids else prompts)
    written = time.perf_counter() - read
    said = f"{counted(count, 'token')} in {written:.2f} s ({count / written:.0f} tokens/s)"
    read_first = counted(sum(lengths), "token")
    print(f"{said}, after {read_first} of prompts in {read - started:.2f} s", file=sys.stderr)
    return texts


def _read_prompts(file: Path) -> list[str]:
    with reworded(ConfigError, f"--prompt-file: {file} cannot be read", caught=(OSError, UnicodeDecodeError)):
        lines = file.read_text(encoding="utf-8").split("\n")
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompt-file: {file} has no line with text; write a prompt in each line")
    return prompts


def _print_stream(tokens: Iterator["Generated"], prompts: Sequence[str]) -> tuple[int, list[str]]:
    """Prints every prompt with its text: the first one as it is generated, each other one when all before it have
    ended. Returns the number of tokens, and the texts."""
    count, shown, printed, ended, texts = 0, 0, 0, set[int](), [""] * len(prompts)

    def show(number: int) -> None:
        title = f"--- prompt {number + 1} ---\n" if len(prompts) > 1 else ""
        say(title + prompts[number], end="")

    show(0)
    for piece in tokens:
        count += piece.token is not None
        texts[piece.prompt] += piece.text
        if piece.end is not None:
            ended.add(piece.prompt)
        while shown < len(prompts):
            say(texts[shown][printed:], end="")
            printed = len(texts[shown])
            if shown not in ended:
                break
            print()
            shown, printed = shown + 1, 0
            if shown < len(prompts):
                show(shown)
    return count, texts
