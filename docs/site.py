"""Generates pages of the site that `make docs` builds: the reference from docstrings, schema and commands, and the
pages at the root of the repository. mkdocs calls the functions `on_...`."""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from nsa.cli.main import app
from nsa.config import Config

ROOT = Path(__file__).resolve().parents[1]
API = {
    "reference/layers.md": "# Layers\n\n::: nsa.nn",
    "reference/operators.md": "# Operators\n\n::: nsa.ops\n\n::: nsa.ops.dispatch.counters",
    "reference/runs.md": "# Trained runs\n\n::: nsa.load_run\n\n::: nsa.train.trained.TrainedRun\n\n"
    "::: nsa.generate_tokens\n\n::: nsa.generate.stream.Generated",
    "reference/errors.md": "# Errors\n\n"
    "[Reliability](../reliability.md#exit-codes) lists their exit codes and what to do about each.\n\n"
    "::: nsa.errors",
}
# Files that have another place in the site; other files outside docs/ to which a page links are copied to source/.
PLACES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
    "LICENSE": "source/LICENSE.txt",
    "nsa/config/schema.py": "reference/configuration.md",
    "docs/readiness-h200/readiness.md": "readiness-h200/readiness.html",
}
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
COLUMNS = re.compile(r"(?:^\w+(?:, \w+)* {2,}\S.*\n(?: {4,}\S.*\n)*)+", re.MULTILINE)
WORDS = {"integer": "whole number", "number": "number", "boolean": "`true` or `false`", "string": "text"}
LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "multipleOf": "a multiple of",
    "minItems": "at least",
    "maxItems": "at most",
}

Fields = dict[str, Any]  # a part of a JSON schema


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the generated pages, those of the root, and the files to which pages link."""
    written = {source: place for source, place in PLACES.items() if place.endswith(".md") and source.endswith(".md")}
    pages = {place: (ROOT / source).read_text(encoding="utf-8") for source, place in written.items()}
    pages |= {**API, "reference/configuration.md": configuration_page(), "reference/commands.md": commands_page()}
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    for source in [*written, *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]:
        for target, _ in LINK.findall((ROOT / source).read_text(encoding="utf-8")):
            path = _in_repository(source, target)
            is_new = (place := _place(path)).startswith("source/") and place not in files.src_uris
            if is_new and (ROOT / path).is_file():  # else it is no link, or one that mkdocs reports
                files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository into links between those of the site."""
    here = page.file.src_uri
    source = next((source for source, place in PLACES.items() if place == here), f"docs/{here}")

    def moved(link: re.Match[str]) -> str:
        path = _in_repository(source, link[1])
        if not (ROOT / path).is_file():
            return link[0]
        return f"]({posixpath.relpath(_place(path), posixpath.dirname(here) or '.')}{link[2] or ''})"

    return LINK.sub(moved, markdown)


def _in_repository(source: str, target: str) -> str:
    """The path of a link's target, from the root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _place(path: str) -> str:
    """Where the site has a file of the repository."""
    return PLACES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}")


class AlignedColumns(Extension):
    """Shows the lines `name   meaning` of a docstring as a table."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = COLUMNS.sub(_table_of_columns, obj.docstring.value + "\n").rstrip()


def _table_of_columns(columns: re.Match[str]) -> str:
    rows = re.findall(r"^(\w+(?:, \w+)*) {2,}((?:.*\n)(?: {4,}.*\n)*)", columns[0], re.MULTILINE)
    cells = [[f"`{name}`", " ".join(meaning.split())] for name, meaning in rows]
    return "\n" + _table(["name", "meaning"], cells) + "\n"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def configuration_page() -> str:
    """Every key of a configuration with its values, its default and its meaning."""
    schema = Config.model_json_schema()
    parts = [
        "# Configuration\n\nA configuration is a YAML file with these sections. Every key has a default, and can be "
        "overridden on the command line: `nsa train quickstart train.steps=40`. An unknown key or a wrong value is an "
        "error. `nsa config show NAME` prints a whole configuration.\n"
    ]
    for name, about, keys in _sections(schema, schema["$defs"], ""):
        parts.append(f"## {name}\n\n{about}\n\n" + _table(["key", "value", "default", "meaning"], keys))
    return "\n".join(parts)


def _sections(section: Fields, known: Fields, prefix: str) -> Iterator[tuple[str, str, list[list[str]]]]:
    """Name, description and keys of a section, if it has keys of its own, and of the sections in it."""
    fields = {name: _resolved(field, known) for name, field in section["properties"].items()}
    keys = [
        [f"`{prefix}{name}`", values(field, known), _default(field.get("default")), field.get("description", "")]
        for name, field in fields.items()
        if "properties" not in field
    ]
    if keys:
        yield prefix.removesuffix("."), section.get("description", ""), keys
    for name, field in fields.items():
        for part in (field, field.get("items", {}), *field.get("anyOf", [])):
            if "properties" in (inner := _resolved(part, known)):
                yield from _sections(inner, known, f"{prefix}{name}{'[]' if 'items' in field else ''}.")


def _resolved(field: Fields, known: Fields) -> Fields:
    return {**known[field["$ref"].rpartition("/")[2]], **field} if "$ref" in field else field


def _default(value: Any) -> str:
    words = {None: "unset", True: "`true`", False: "`false`"}
    return words[value] if value is None or isinstance(value, bool) else f"`{value}`"


def values(field: Fields, known: Fields) -> str:
    """The values that a field of the schema takes, in words."""
    field = _resolved(field, known)
    if "anyOf" in field:
        return ", or ".join(values(one, known) for one in field["anyOf"] if one.get("type") != "null")
    if choices := field.get("enum") or ([field["const"]] if "const" in field else []):
        return ", ".join(f"`{choice}`" for choice in choices)
    if "properties" in field:
        return "a section"
    limits = [f"{word} {field[name]}" for name, word in LIMITS.items() if name in field]
    if field["type"] == "array":
        inner = _resolved(field["items"], known)
        of = "sections" if "properties" in inner else values(inner, known)
        return " ".join(["list", *([f"({', '.join(limits)})"] if limits else []), "of", of])
    return ", ".join([WORDS[field["type"]], *limits])


def commands_page() -> str:
    """What `--help` prints, command by command."""
    parts = ["# Commands\n\nAs `nsa COMMAND --help` prints it.\n"]
    for name, text in _helps("nsa", typer.main.get_command(app)):
        parts.append(f"## {name}\n\n```text\n{text.strip()}\n```\n")
    return "\n".join(parts)


def _helps(name: str, command: Any) -> Iterator[tuple[str, str]]:
    with command.make_context(name, [], resilient_parsing=True, terminal_width=100) as context:
        context.info_name = name
        yield name, command.get_help(context)
    for inner, below in getattr(command, "commands", {}).items():
        yield from _helps(f"{name} {inner}", below)
