"""`nsa ckpt list`, `nsa ckpt verify`, `nsa ckpt export`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nsa.cli.output import say
from nsa.errors import CheckpointError

app = typer.Typer(help="List, verify and export checkpoints.", no_args_is_help=True)

RunFolder = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.", show_default=False)]


def _source(of_a_run: str) -> Any:
    about = f"A run ({of_a_run}) or one checkpoint: its folder, or checkpoints/latest or checkpoints/best."
    return typer.Argument(metavar="RUN_DIR|CHECKPOINT", help=about, show_default=False)


@app.command("list")
def list_checkpoints(run_dir: RunFolder) -> None:
    """List the checkpoints of a run, newest first."""
    from nsa.checkpoint.format import BEST, LATEST, committed, read_pointer
    from nsa.checkpoint.restore import read_state

    root = _root(run_dir)
    latest, best = read_pointer(root, LATEST), read_pointer(root, BEST)
    for path in committed(root):
        marks = [mark for mark, name in (("latest", latest), ("best", best)) if name == path.name]
        try:
            state = read_state(path)
            progress = state["progress"]
            size = sum(file.stat().st_size for file in path.iterdir()) / 2**20
            loss, val = ("-" if progress[name] is None else f"{progress[name]:.4f}" for name in ("loss", "val_loss"))
            about = (
                f"{progress['tokens']:,} tokens | loss {loss} | validation {val} | "
                f"{state['strategy']} x {state['world_size']} | {size:.1f} MiB"
            )
        except (CheckpointError, OSError, KeyError, TypeError, ValueError) as error:
            about = f"cannot be read: {error}"
        say(f"{path.name} | {about}{' | ' if marks else ''}{', '.join(marks)}")


@app.command()
def verify(source: Annotated[Path, _source("all its checkpoints")]) -> None:
    """Compare every byte with the manifest and load what a resume loads; exit code 4 if a checkpoint is damaged."""
    from nsa.checkpoint.export import resolve_pointer
    from nsa.checkpoint.format import MANIFEST_FILE, committed
    from nsa.checkpoint.format import verify as verify_one
    from nsa.checkpoint.restore import check_loadable

    source = resolve_pointer(source)
    checkpoints = [source] if (source / MANIFEST_FILE).exists() else committed(_root(source))
    problems: list[str] = []
    for path in checkpoints:
        try:
            files = verify_one(path)
            check_loadable(path)
        except CheckpointError as error:
            if path.exists():
                problems.append(str(error))
            else:  # a run renames a checkpoint before it deletes it
                say(f"{path}: deleted by the run while it was read")
        else:
            say(f"{path}: ok, {len(files)} files, {sum(f.bytes for f in files.values()):,} bytes")
    if problems:
        raise CheckpointError("\n".join(problems))


@app.command()
def export(
    source: Annotated[Path, _source("its newest undamaged checkpoint")],
    target: Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="The file to write.", show_default=False)],
) -> None:
    """Write a checkpoint's weights as one safetensors file: `nsa export --format safetensors` of a checkpoint."""
    from nsa.checkpoint.export import export_weights, find_checkpoint

    checkpoint = find_checkpoint(source)
    say(f"{target}: {export_weights(checkpoint, target)} tensors of {checkpoint}")


def _root(run_dir: Path) -> Path:
    from nsa.checkpoint.format import FOLDER, committed
    from nsa.run_folder import METRICS_FILE, reading_run

    root = run_dir / FOLDER
    with reading_run(run_dir):
        run_dir.stat()
    if not committed(root):
        if (run_dir / METRICS_FILE).exists():
            raise CheckpointError(f"{run_dir}: has saved no checkpoint yet")
        raise CheckpointError(f"{run_dir}: contains no checkpoint; give the out_dir of a run")
    return root
