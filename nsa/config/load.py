"""Loads a YAML file with `key=value` overrides as a validated configuration, or raises one error that lists all
mistakes. Also lists how a configuration differs from a saved one.

Files are read as plain data (nsa.plain_yaml). Every message names the key, its origin and the closest valid key.
"""

import difflib
import re
import reprlib
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from nsa.config.schema import Config, MixturePart, SourceConfig
from nsa.config.variables import environment_settings
from nsa.errors import ConfigError
from nsa.files import read_regular
from nsa.plain_yaml import LARGEST, LARGEST_SAVED, flat, parse_yaml

_repr = reprlib.Repr()  # shortens values: one may be as large as its file
_repr.maxlevel, _repr.maxstring, _repr.maxother = 2, 60, 60
_QUOTE = "put a text that begins with *, & or ! in quotes, for example ['*.txt']"
# Advice by a part of the parser's message; the first match counts.
_YAML_HINTS = {
    "\\t": "indent with spaces, not tabs",
    "tag": f"tags are not supported, write the plain value; {_QUOTE}",
    "alias": f"write out its value; {_QUOTE}",
    "is not supported": "write out its value",
    "given twice": "keep one of them",
    "alphabetic or numeric": _QUOTE,
    "cannot start any token": "put the value in quotes",
}
_YAML_HINT = "check indentation, colons and brackets there"

_KIND_KEYS = {("model", "attention"), ("model", "layer_pattern")}

SHIPPED = Path(__file__).parents[1] / "configs"  # in a checkout, a link to the folder in the repository root


class ConfigWarning(UserWarning):
    """A warning about a valid configuration."""


def load_config(
    path: str | Path,
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    in_run: bool = False,
) -> Config:
    """Reads `path`, applies `section.key=value` overrides in order (the last wins) and validates the result.

    If there is no such file, `path` may be one of `shipped_names()`.
    The old NSA_* variables in `environment` set keys that neither the file nor an override sets.
    A file in a run folder (`in_run`) must be a regular file; any other file may be a link or a pipe.
    """
    path = Path(path)
    shipped = str(path) in shipped_names() and not path.is_file()
    try:
        text = _read(SHIPPED / f"{path}.yaml" if shipped else path, in_run)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_similar_file(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not valid UTF-8; save the file as UTF-8 text") from None
    except OSError as error:
        inside = path / "config.yaml"  # of a run
        hint = f"did you mean {inside}?" if inside.is_file() else "give the path of a YAML file"
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; {hint}") from None
    content = _parse_yaml(text, str(path), LARGEST_SAVED if in_run else LARGEST)
    return parse_config(content, str(path), overrides, environment)


def _read(path: Path, in_run: bool) -> str:
    if in_run:
        return read_regular(path, 4 * LARGEST_SAVED).decode()  # a character has up to 4 bytes
    with path.open(encoding="utf-8") as file:
        text = file.read(LARGEST + 1)
    if not text and path.is_fifo():
        raise ConfigError(f"{path}: the pipe is empty; check the command that writes it, or give a file")
    return text


def shipped_names() -> list[str]:
    """Returns the names of the configurations that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def parse_config(
    tree: Any, origin: str, overrides: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> Config:
    """Applies overrides to a parsed YAML document and validates it; `origin` names it in errors.

    An override of model.attention sets the kind of all layers: it resets model.layer_pattern of the document.
    """
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        kind = {list: "a list", str: "a text", int: "a number"}.get(type(tree), type(tree).__name__)
        raise ConfigError(f"{origin}: must hold sections such as 'model:' and 'train:', got {kind}")
    tree = {key: {} if value is None else value for key, value in tree.items()}  # an empty section: 'model:'
    parsed = [(override, *_parse_override(override)) for override in overrides]
    if isinstance(tree.get("model"), dict) and any(keys == ("model", "attention") for _, keys, _ in parsed):
        tree["model"] = {key: value for key, value in tree["model"].items() if key != "layer_pattern"}
    applied: list[tuple[tuple[str, ...], str]] = []
    for override, keys, value in parsed:
        _section_of(tree, keys, f"override '{override}'")[keys[-1]] = value
        applied.append((keys, f"override '{override}'"))
    for variable, key, value, message in environment_settings(environment or {}):
        if key is not None:
            message = _fill(tree, key, value, variable)
            applied += [] if message else [(key, variable)]
        if message:
            warnings.warn(message, ConfigWarning, stacklevel=2)
    _reset_unused(tree, [keys for keys, _ in applied])
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_describe(error, origin, applied)))) from None
    for keys, setter in applied if config.data.mixture else ():
        if keys[0] == "data" and keys[-1] in SourceConfig.model_fields:
            raise ConfigError(f"{setter}: has no effect with data.mixture; add data.mixture=[], or change the mixture")
    return config


def _reset_unused(tree: dict[str, Any], overridden: list[tuple[str, ...]]) -> None:
    """Removes the section `msa` if an override of the kind of attention, as in a comparison of kinds, leaves no MSA
    layer. A section that an override sets is kept, and validation reports it."""
    model = tree.get("model")
    if isinstance(model, dict) and _KIND_KEYS & set(overridden) and "msa" not in {keys[0] for keys in overridden}:
        kinds = model.get("layer_pattern") or [model.get("attention")]
        if isinstance(kinds, list) and "msa" not in kinds:
            tree.pop("msa", None)


def _filled(defaults: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """Adds default values for the keys that `stored` lacks."""
    sections = [key for key, value in defaults.items() if isinstance(value, dict) and isinstance(stored.get(key), dict)]
    return defaults | stored | {key: _filled(defaults[key], stored[key]) for key in sections}


def differences(stored: Any, config: Config) -> list[str]:
    """Returns one line for every key whose value differs from `stored`, a configuration as plain data.

    Ignores train.out_dir, since the folder of a run may be moved. A key that an earlier version did not have counts as
    its default.
    """
    then = flat(_filled(Config().to_dict(), stored)) if isinstance(stored, dict) else {}
    mixture = then.get("data.mixture")
    if isinstance(mixture, list):
        then["data.mixture"] = [
            MixturePart().model_dump() | part if isinstance(part, dict) else part for part in mixture
        ]
    return [
        f"{name}: {repr(then[name]) if name in then else 'unknown'} then, {value!r} now"
        for name, value in flat(config.to_dict()).items()
        if name != "train.out_dir" and (name not in then or then[name] != value)
    ]


def warn_if_unlikely(config: Config, origin: str) -> None:
    """Warns about valid settings that are probably mistakes."""
    remarks = [
        f"data.repo: {part.repo!r} is not used, since data.source is {part.source}; set data.source=hub"
        for part in (*config.data.mixture, config.data)
        if part.repo and part.source not in ("hub", "synthetic")
    ]
    remarks += [
        f"data.paths: is not used, since data.source is {part.source}; set data.source=text or another that reads files"
        for part in (*config.data.mixture, config.data)
        if part.paths and part.source in ("python", "synthetic", "recall")
    ]
    warmup, steps = config.train.warmup_steps, config.train.steps
    if warmup > steps:
        remarks.append(
            f"train.warmup_steps: {warmup} is more than the {steps} of train.steps: the learning rate never reaches "
            f"train.lr={config.train.lr:g}; lower it, unless this run tests the start of a longer one"
        )
    if config.train.profile_steps and config.train.profile_steps[0] > steps:
        remarks.append(f"train.profile_steps: begins after the {steps} of train.steps: nothing is profiled; lower it")
    for remark in remarks:
        warnings.warn(f"{origin}: {remark}", ConfigWarning, stacklevel=2)


def split_overrides(joined: str) -> list[str]:
    """Splits `"train.steps=10 model.n_layers=2"` into overrides. Spaces inside brackets, braces or quotes are kept."""
    parts, depth, quote = [""], 0, ""
    for char in joined:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        depth += 0 if quote else (char in "[{") - (char in "]}")
        if char.isspace() and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if quote or depth:
        raise ConfigError(
            f"--override: cannot be read: {joined!r}; write key=value pairs, and close brackets and quotes"
        )
    return list(filter(None, parts))


def _parse_yaml(text: str, origin: str, most: int = LARGEST) -> Any:
    try:
        return parse_yaml(text, most)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        is_tag = "',' or ']'" in problem and re.search(r"[\[,]\s*!", text)  # [!a.*]: the tag takes the bracket
        default = _QUOTE if is_tag else _YAML_HINT
        hint = next((hint for part, hint in _YAML_HINTS.items() if part in problem), default)
        raise ConfigError(f"{origin}{where}: not valid YAML: {problem}; {hint}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: not valid YAML: {error}") from None


def _parse_override(override: str) -> tuple[tuple[str, ...], Any]:
    key, equals, value = override.partition("=")
    keys = tuple(key.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(f"override '{override}': write it as section.key=value, for example train.steps=10")
    try:
        override.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"override '{override}': is not valid UTF-8; rename the file or value") from None
    parsed = _parse_yaml(value, f"override '{override}'")
    first = value.lstrip()[:1]
    is_changed = isinstance(parsed, str) and parsed != value
    if first == "#" or (is_changed and (first not in "'\"|>" or (first in "'\"" and "\n" in value))):
        raise ConfigError(
            f"override '{override}': YAML reads {parsed!r} here; put the value in double quotes, with \\n for the "
            f"end of a line: {key}='\"...\"'"
        )
    return keys, parsed


def _section_of(tree: dict[str, Any], keys: tuple[str, ...], origin: str) -> dict[str, Any]:
    """Returns the section that contains the last key; creates missing sections."""
    for depth, key in enumerate(keys[:-1], start=1):
        if tree.get(key) is None:  # an optional section may be null
            tree[key] = {}
        tree = tree[key]
        if not isinstance(tree, dict):
            name = ".".join(keys[:depth])
            raise ConfigError(f"{origin}: '{name}' is not a section; set its value with {name}=VALUE")
    return tree


def _fill(tree: dict[str, Any], keys: tuple[str, ...], value: Any, variable: str) -> str:
    """Sets the key unless it is set. Returns a warning if it is set to another value."""
    try:
        present = _section_of(tree, keys, variable).setdefault(keys[-1], value)
    except ConfigError:
        return ""  # validation reports it
    return "" if present == value else f"{variable}: {'.'.join(keys)} is set to {present!r} explicitly, which wins"


def _describe(error: ValidationError, origin: str, applied: list[tuple[tuple[str, ...], str]]) -> Iterable[str]:
    for problem in error.errors():
        keys, section = _locate(problem["loc"])
        if problem["type"] == "rule":
            keys = (*keys, *str(problem["ctx"]["field"]).split("."))
        if problem["type"] == "extra_forbidden":
            text = f"unknown key{_similar_key(keys, section)}"
        else:
            text = "must be a section" if problem["type"] == "model_type" else _plain(problem["msg"])
            if problem["type"] != "rule":
                missing = "nothing; remove the key to use its default"
                text += f", got {missing if problem['input'] is None else _repr.repr(problem['input'])}"
            if problem["type"] == "string_type" and isinstance(problem["input"], int | float):
                text += """; put it in quotes (in an override: '"..."')"""
        yield f"{_source(keys, text, applied) or origin}: {'.'.join(keys)}: {text}"


def _source(keys: tuple[str, ...], text: str, applied: list[tuple[tuple[str, ...], str]]) -> str | None:
    """Returns the override or variable that last set these keys, a key inside or around them, or a field that the rule
    in `text` names. None: the file set them."""
    for path, setter in reversed(applied):
        shared = min(len(path), len(keys))
        if path[:shared] == keys[:shared]:
            return setter
    for path, setter in reversed(applied):
        name = path[-1] if path[:-1] == keys[:-1] else ".".join(path)
        if re.search(rf"\b{re.escape(name)}\b", text):
            return setter
    return None


def _locate(path: tuple[str | int, ...]) -> tuple[tuple[str, ...], type[BaseModel]]:
    """Returns the keys of a path, without the parts that pydantic adds for members of a union, and the section of the
    last key."""
    section: type[BaseModel] = Config
    inner: type[BaseModel] | None = Config
    keys: list[str] = []
    for part in path:
        if isinstance(part, str):  # a number is an index into a list
            if inner is None:
                break
            section = inner
            inner = _section_in(section.model_fields[part].annotation) if part in section.model_fields else None
        keys.append(str(part))
    return tuple(keys), section


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the section type in the annotation of a field, which may be a list or optional; None if there is none."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _similar_key(keys: tuple[str, ...], section: type[BaseModel]) -> str:
    wrong = keys[-1].lower()
    close = difflib.get_close_matches(wrong, section.model_fields, n=1, cutoff=0.6)
    if "." in wrong and (*keys[:-1], *wrong.split(".")) in _all_keys(Config):  # written as in an override
        outer, _, inner = wrong.rpartition(".")
        return f"; in a file, write '{inner}:' inside the section '{outer.replace('.', ': ')}:'"
    elsewhere = next((path for path in _all_keys(Config) if path[-1] == wrong), None)
    if elsewhere and wrong not in section.model_fields:  # an equal name elsewhere is likelier than a similar one here
        return f"; did you mean '{'.'.join(elsewhere)}'?"
    if close:
        return f"; did you mean '{'.'.join((*keys[:-1], close[0]))}'?"
    return f"; valid here: {', '.join(section.model_fields)}"


def _all_keys(section: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterable[tuple[str, ...]]:
    for name, field in section.model_fields.items():
        yield (*prefix, name)
        if inner := _section_in(field.annotation):
            yield from _all_keys(inner, (*prefix, name))


def _similar_file(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("configs")
    names = [p.name for p in folder.glob("*.yaml")] if folder.is_dir() else []
    files = [folder / name for name in difflib.get_close_matches(path.name, names, n=1)]
    if similar := files or difflib.get_close_matches(path.stem, shipped_names(), n=1):
        return f"; did you mean {similar[0]}?"
    return "; give the path of a YAML file or a name that `nsa config list` prints, for example quickstart"


def _plain(message: str) -> str:
    """Removes the label of pydantic's message and starts it in lower case, since it follows a colon."""
    message = message.removeprefix("Input ").removeprefix("Value error, ").replace(" after validation", "")
    message = message.replace("should be", "must be").replace("should have", "must have")
    return message[:1].lower() + message[1:]
