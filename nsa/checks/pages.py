"""Pages of `nsa ready` and `nsa doctor`: sections with a table or lines of text, as Markdown or as HTML."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from nsa import __version__
from nsa.errors import LaunchError, reworded
from nsa.files import replace_file
from nsa.inspect.report import page
from nsa.record.numbers import one_line

_MORE_STYLE = """
.verdict{font-size:17px;margin:18px 0;padding:14px 18px;border-radius:10px;border:1px solid var(--line);
background:var(--goodbg);color:var(--good)}
.verdict.no{background:var(--badbg);color:var(--bad)}.verdict ul{margin:6px 0 0;padding-left:22px}
.verdict li{overflow-wrap:anywhere}.verdict pre{white-space:pre-wrap;overflow-wrap:anywhere}
td.pass{color:var(--good)}td.fail{color:var(--bad);font-weight:600}td.na{color:var(--soft)}
td{overflow-wrap:anywhere}
"""
_CLASSES = {"pass": "pass", "better": "pass", "fail": "fail", "worse": "fail", "not run": "fail", "n/a": "na"}


@dataclass(frozen=True)
class Section:
    """A table under its heading or, without a `head`, lines of text as they are."""

    title: str
    head: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    lines: Sequence[str] = ()

    def markdown(self, level: int = 2) -> Iterator[str]:
        yield from ("", f"{'#' * level} {cell(self.title)}", "")
        if self.head:
            yield from (_row(self.head), "|" + "---|" * len(self.head), *map(_row, self.rows))
        else:  # no line can end the block
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
    """Text from a file as part of a line of Markdown."""
    return one_line(str(text)).replace("|", "\\|")


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(cell, cells)) + " |"


def _html_row(cells: Sequence[object]) -> str:
    made = (f'<td class="{_CLASSES.get(str(c), "")}">{escape(one_line(str(c)))}</td>' for c in cells)
    return f"<tr>{''.join(made)}</tr>"


def html_page(
    name: str, facts: Sequence[str], verdict: str, *, good: bool, lines: Sequence[str], sections: Sequence[Section]
) -> str:
    """A page that loads nothing: the verdict with its commands or reasons, then the sections."""
    reasons = "".join(f"<li>{escape(one_line(line))}</li>" for line in lines)
    inner = f"<pre>{escape(chr(10).join(lines))}</pre>" if good else f"<ul>{reasons}</ul>"
    known = "".join(f'<p class="facts">{escape(one_line(fact))}</p>' for fact in facts)
    header = f'<header><div class="title"><h1>{escape(name)}</h1></div>{known}</header>'
    kind, answer = "verdict" if good else "verdict no", f"<strong>{escape(verdict)}</strong>{inner}"
    inside = f'<div class="{kind}" id="verdict">{answer}</div>' + "".join(section.html() for section in sections)
    return page(escape(verdict), header, inside, f"Written by nsa {__version__}", _MORE_STYLE)


def write_files(folder: Path, contents: Mapping[str, str]) -> None:
    """Writes each file completely or not at all."""
    for name, text in contents.items():
        with reworded(LaunchError, f"{folder / name}: cannot be written", "choose another folder with --out"):
            replace_file(folder / name, text.encode())
