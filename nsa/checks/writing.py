"""What the pages of `nsa ready` and `nsa doctor` are written with."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from nsa.checkpoint.files import write_atomically
from nsa.errors import CheckpointError, LaunchError
from nsa.record.numbers import one_line


def write_files(folder: Path, contents: Mapping[str, str]) -> None:
    """Each of them whole or not at all."""
    try:
        for name, text in contents.items():
            write_atomically(folder / name, text.encode())
    except CheckpointError as error:
        raise LaunchError(f"{error}; choose another place with --out") from None


def cell(text: object, most: int = 2000) -> str:
    """Words from a file inside a page of Markdown."""
    return one_line(str(text), most).replace("|", "\\|")


def row(*cells: object) -> str:
    return "| " + " | ".join(cell(each) for each in cells) + " |"


def table_head(*names: str) -> Iterator[str]:
    yield from (row(*names), "|" + "---|" * len(names))


def block(title: str, lines: list[str]) -> Iterator[str]:
    """Lines as they are; they cannot end the block."""
    yield from ("", f"{title}:", "", "```", *(line.replace("```", "~~~") for line in lines), "```")
