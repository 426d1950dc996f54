"""`nsa generate`."""

from pathlib import Path
from typing import Annotated

import typer

from nsa.config import load_config
from nsa.errors import CheckpointError, ConfigError

RunFolder = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a finished run.", show_default=False)]


def generate(
    run_dir: RunFolder,
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
    from nsa.record.schema import CONFIG_FILE

    if not 0.0 < top_p <= 1.0:
        raise ConfigError(f"--top-p: must be above 0 and at most 1, got {top_p}; 1 draws from all tokens")
    if not (run_dir / CONFIG_FILE).is_file():
        raise CheckpointError(f"{run_dir}: is no run folder (no config.yaml in it); give the out_dir of a run")
    config = load_config(run_dir / CONFIG_FILE)

    from nsa.checkpoint.export import load_any_weights
    from nsa.data.tokenizers import tokenizer_for
    from nsa.nn.model import build_model
    from nsa.nn.sampling import sample_tokens
    from nsa.parallel.launch import pick_device
    from nsa.parallel.numerics import numerics
    from nsa.train.state import vocabulary

    tokenizer = tokenizer_for(config.data)
    model = build_model(config.model, config.nsa, vocabulary(config, tokenizer), config.train.seed)
    model.to(pick_device(config.runtime.device)).eval()

    def write(title: str) -> None:
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
        print(f"--- {title} ---\n{text}\n" if beside_untrained else text)

    with numerics(config.runtime):
        if beside_untrained:
            write("before training")
        load_any_weights(model, run_dir)
        write("after training")
