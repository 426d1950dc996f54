"""`nsa import`, `nsa export`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from nsa.cli.arguments import JoinedOverrides, TrainedModel, all_overrides, overrides_such_as
from nsa.cli.output import say


def import_(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a Hugging Face model.", show_default=False)],
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="New folder to write.", show_default=False)],
    overrides: Annotated[list[str] | None, overrides_such_as("nsa.window=512")] = None,
    override: JoinedOverrides = None,
    attention: Annotated[
        Literal["nsa", "msa"] | None,
        typer.Option(help="Convert the attention layers to this kind; unchanged when unset."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG", help="Configuration file or name for the other sections, for example convert_msa."
        ),
    ] = None,
    copy_kv: Annotated[
        bool, typer.Option("--copy-kv", help="Give each branch of NSA layers its own copy of keys and values.")
    ] = False,
) -> None:
    """Convert a Llama, Mistral, Qwen2, Qwen3 or MiniMax-M3 model to a run folder."""
    from nsa.hf.importer import import_model

    made = import_model(
        source,
        run_dir,
        attention=attention,
        shared_kv=not copy_kv,
        base=config,
        overrides=all_overrides(overrides, override),
    )
    kinds = made.model.layer_kinds()
    layers = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    sizes = f"vocabulary: {made.model.vocab_size:,} tokens; context: {made.train.seq_len:,} tokens"
    say(f"{run_dir}: layers: {layers}; width: {made.model.dim}; {sizes}")
    say(f"train from it with train.init_from={run_dir}")


def export(
    source: TrainedModel,
    target: Annotated[
        Path, typer.Argument(metavar="DIR|FILE", help="The folder or the file to write.", show_default=False)
    ],
    format_: Annotated[
        Literal["hf", "vllm", "nsa", "safetensors"],
        typer.Option(
            "--format",
            "--for",
            help="A folder for transformers, for vLLM and SGLang, or for transformers with the code of nsa, which can "
            "train the index of MSA; or the weights as one file.",
        ),
    ] = "hf",
    package: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address from which the model card installs nsa, such as git+https://HOST/PATH/nsa.git.",
        ),
    ] = None,
) -> None:
    """Export a trained model for other programs."""
    if format_ == "safetensors":
        from nsa.checkpoint.export import export_weights, find_weights

        found = find_weights(source)
        say(f"{target}: {export_weights(found, target)} tensors of {found}")
        return
    from nsa import load_run

    run = load_run(source, overrides=["runtime.device=cpu"])
    from nsa.hf.exporter import export_model  # takes seconds to import

    notes = export_model(run, target, package, format_)
    say(f"{target}: {run.model.num_parameters():,} parameters of {run.weights}")
    for note in notes:
        say(note)
