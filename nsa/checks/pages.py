"""The page of `nsa ready`: sections with a table or lines of text, as Markdown or as HTML."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from nsa.errors import LaunchError, reworded
from nsa.files import replace_file
from nsa.formatting import one_line

_CLASSES = {"pass": "pass", "better": "pass", "fail": "fail", "worse": "fail", "not run": "fail", "n/a": "na"}


@dataclass(frozen=True)
class Section:
    """A section with a table or, without a `head`, with preformatted lines."""

    title: str
    head: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    lines: Sequence[str] = ()

    def markdown(self) -> Iterator[str]:
        yield from ("", f"## {cell(self.title)}", "")
        if self.head:
            yield from (_row(self.head), "|" + "---|" * len(self.head), *map(_row, self.rows))
        else:  # a line must not end the code block
            yield from ("```", *(line.replace("```", "~~~") for line in self.lines), "```")

    def html(self) -> str:
        name = self.title.lower().replace(" ", "-")
        if not self.head:
            body = f"<pre>{escape(chr(10).join(self.lines))}</pre>"
        else:
            heads = "".join(f"<th>{escape(name)}</th>" for name in self.head)
            body = f"<table><tr>{heads}</tr>{''.join(map(_html_row, self.rows))}</table>"
        title = escape(one_line(self.title))
        return f'<section id="{escape(name)}"><h2>{title}</h2><div class="card scroll">{body}</div></section>'


def cell(text: object) -> str:
    """Escapes untrusted text for a cell of a Markdown table."""
    return one_line(str(text)).replace("|", "\\|")


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(cell, cells)) + " |"


def _html_row(cells: Sequence[object]) -> str:
    made = (f'<td class="{_CLASSES.get(str(c), "")}">{escape(one_line(str(c)))}</td>' for c in cells)
    return f"<tr>{''.join(made)}</tr>"


def write_files(folder: Path, contents: Mapping[str, str]) -> None:
    """Writes each file atomically."""
    for name, text in contents.items():
        with reworded(LaunchError, f"{folder / name}: cannot be written", "choose another folder with --out"):
            replace_file(folder / name, text.encode())
