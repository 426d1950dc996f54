"""Pages of the documentation, parsed as a reader's browser would."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Page:
    path: Path

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines()

    @cached_property
    def tokens(self) -> list[Token]:
        return MarkdownIt("commonmark").enable("table").parse("\n".join(self.lines))

    @property
    def inline(self) -> Iterator[Token]:
        """Text, code marks and links, without their paragraphs."""
        for token in self.tokens:
            yield from token.children or []

    @property
    def links(self) -> list[str]:
        return [str(token.attrs["href"]) for token in self.inline if token.type == "link_open"]

    @property
    def code_marks(self) -> list[str]:
        return [token.content for token in self.inline if token.type == "code_inline"]

    @property
    def anchors(self) -> set[str]:
        """The names that GitHub gives to the headings."""
        headings = [self.tokens[i + 1].content for i, t in enumerate(self.tokens) if t.type == "heading_open"]
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    @property
    def tables(self) -> list[list[list[str]]]:
        """Tables as lists of rows, rows as lists of cells; without the line under the header."""
        spans = [token.map for token in self.tokens if token.type == "table_open" and token.map]
        rows = [[_cells(line) for line in self.lines[first:last]] for first, last in spans]
        return [[table[0], *table[2:]] for table in rows]

    def blocks(self, *languages: str) -> list[str]:
        return [t.content for t in self.tokens if t.type == "fence" and t.info.strip() in languages]

    @property
    def commands(self) -> list[list[str]]:
        """The words after `nsa` in every line of a shell block that runs it."""
        lines = "\n".join(self.blocks("sh", "bash")).replace("\\\n", " ").splitlines()
        found = (shlex.split(line, comments=True) for line in lines if re.search(r"(^|/|-m )nsa ", line))
        return [words[_place_of_nsa(words) + 1 :] for words in found]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|"))]


def _place_of_nsa(words: list[str]) -> int:
    return next(place for place, word in enumerate(words) if Path(word).name == "nsa")


def table_with(page: Page, *header: str) -> list[list[str]]:
    """The rows of the page's only table with this header."""
    (found,) = [table[1:] for table in page.tables if table[0] == list(header)]
    return found


PAGES = [Page(path) for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])]
README = Page(ROOT / "README.md")
