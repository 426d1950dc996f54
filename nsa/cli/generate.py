"""`nsa generate`."""

from pathlib import Path
from typing import Annotated

import typer

from nsa import load_run
from nsa.cli.arguments import JoinedOverrides, Overrides, all_overrides
from nsa.cli.output import say
from nsa.errors import ConfigError

Source = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR|CHECKPOINT|FILE",
        help="A run (its weights, else its newest checkpoint), one checkpoint, or a .safetensors file of a run.",
        show_default=False,
    ),
]


def generate(
    source: Source,
    overrides: Overrides = None,
    override: JoinedOverrides = None,
    prompt: Annotated[str, typer.Option(help="Text to go on from; empty starts a new document.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from the k likeliest only.")] = None,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest that make up this share.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same text.")] = 0,
    beside_untrained: Annotated[
        bool, typer.Option("--beside-untrained", help="First show what the model wrote before training.")
    ] = False,
) -> None:
    """Let a trained model write."""
    if not 0.0 < top_p <= 1.0:
        raise ConfigError(f"--top-p: must be above 0 and at most 1, got {top_p}; 1 draws from all tokens")

    from nsa.nn.model import Decoder, build_model
    from nsa.nn.sampling import sample_tokens
    from nsa.parallel.numerics import numerics

    run = load_run(source, overrides=all_overrides(overrides, override))
    config, tokenizer = run.config, run.tokenizer

    def write(model: Decoder, title: str) -> None:
        ids = [tokenizer.separator, *tokenizer.encode(prompt).tolist()]
        drawn = sample_tokens(
            model,
            ids,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=tokenizer.separator,
        )
        text = prompt + tokenizer.decode(list(drawn))
        say(f"--- {title} ---\n{text}\n" if beside_untrained else text)

    with numerics(config.runtime):
        if beside_untrained:
            untrained = build_model(config.model, config.nsa, run.model.vocab_size, config.train.seed)
            write(untrained.to(run.model.head.weight.device).eval(), "before training")
        write(run.model, "after training")
