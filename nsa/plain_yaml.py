"""Reads YAML as plain data of bounded size, with the numbers of YAML 1.2. Tags that build objects, aliases and merge
keys (a few hundred bytes could expand beyond any memory) and duplicate keys are errors.

PyYAML reads YAML 1.1, in which `060` is 48, `1:30` is 90, `3e-4` is text and `2024-01-01` is a date. This module reads
them as 60, text, a number and text. Underscores between digits are allowed.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

LARGEST = 2**18  # characters; the parser takes about 3 s for a million
LARGEST_SAVED = 4 * LARGEST  # characters of a `dump_yaml` output, which is longer than the file it came from
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_NUMBERS = {
    _INT: re.compile(r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+"),
    _FLOAT: re.compile(
        r"[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    ),
}
_NOT_READ = {_INT, _FLOAT, *(f"tag:yaml.org,2002:{name}" for name in ("timestamp", "merge", "value"))}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, form) for tag, form in known if tag not in _NOT_READ]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise _error("an alias (*) is not supported", self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = str(key_node.value)
            if key == "<<" or key_node.tag == "tag:yaml.org,2002:merge":
                raise _error("a merge key (<<) is not supported", key_node.start_mark)
            if key in seen:
                raise _error(f"key '{key}' is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: Any) -> int | float:
        text = self.construct_scalar(node)
        if _NUMBERS[_INT].fullmatch(text):
            base = {"0o": 8, "0x": 16}.get(text[:2], 10)
            return int(text.replace("_", ""), base)
        if not _NUMBERS[_FLOAT].fullmatch(text):
            raise _error(f"{text!r} is not a number", node.start_mark)
        return float(text.lower().replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))


class _Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _form in _NUMBERS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"(?:{_form.pattern})\Z"), list("-+.0123456789"))
    _Loader.add_constructor(_tag, _Loader.construct_number)


def parse_yaml(text: str, most: int = LARGEST) -> Any:
    """Raises yaml.YAMLError, ValueError or RecursionError."""
    if len(text) > most:
        raise ValueError(f"it has {len(text):,} characters, more than the {most:,} of any configuration")
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  (_Loader is a SafeLoader)
    except (LookupError, AttributeError, TypeError) as error:  # !!bool x, !!timestamp x
        raise ValueError(f"a value does not fit its tag: {error}") from None


def dump_yaml(content: Any, *, ascii_only: bool = False) -> str:
    """Returns text that `parse_yaml` reads as the same content. `ascii_only` escapes all other characters."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=not ascii_only)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values by dotted key such as `train.steps`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _error(problem: str, mark: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)
