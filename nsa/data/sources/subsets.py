"""Finds the parquet files of a subset and a split in a dataset repository, by the conventions of the hub.

1. `configs` in the YAML block at the top of README.md lists subsets, splits and file patterns.
2. If all files are named SUBSET/SPLIT/0000.parquet, this is the branch refs/convert/parquet with the hub's conversion.
3. Otherwise the whole repository is the subset `default`, and every folder is a subset with its name. File names give
   the split: SPLIT-00000-of-00005.parquet, else the word train, validation or test in the name of a folder or the file.
   Without any of these all files are `train`.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath

import yaml

from nsa.data.sources.text import matches
from nsa.errors import DataError
from nsa.plain_yaml import parse_yaml

CARD = "README.md"
LARGEST_FRONT = 2**21  # maximum characters of the YAML at the top of a README
KEYWORDS = {"train": "train|training", "validation": "validation|valid|dev|val", "test": "test|testing|eval|evaluation"}
_WORD = r"(?:^|[-._ 0-9])(?:{})(?:$|[-._ 0-9])"  # a word between characters that are not letters
SHOWN = 12  # maximum names in a message
Subsets = dict[str, tuple[str, dict[str, list[str]]]]  # the folder of each subset, and its patterns by split, if any
Chosen = tuple[list[str], list[str]]  # file names, and patterns for `hf download` that match all of them


def choose(names: Sequence[str], read_card: Callable[[], str], title: str, subset: str, split: str) -> Chosen:
    """Returns the files of a subset and a split. Raises `DataError` with the known names if there is no such subset or
    split."""
    files = [name for name in names if is_parquet(name) and not re.search(r"(^|/)\.", name)]
    known = (_declared(read_card(), title) if CARD in names else {}) or _converted(files)
    if not known:
        folders = {str(folder) for name in files for folder in PurePosixPath(name).parents} - {"."}
        known = {"default": ("", {}), **{folder: (f"{folder}/", {}) for folder in sorted(folders)}}
    if subset == "default" and subset not in known and len(known) == 1:
        subset = next(iter(known))
    if subset not in known:
        raise _unknown("subset", subset, title, known)
    folder, declared = known[subset]
    splits = declared or _split_by_name([name for name in files if name.startswith(folder)], len(folder))
    if splits and split not in splits:
        raise _unknown("split", split, f"subset {subset!r} of {title}", splits)
    if not declared:
        return splits.get(split, []), [f"{folder}*.parquet"]
    patterns = [PurePosixPath(pattern).parts for pattern in splits[split]]
    found = [name for name in names if any(matches(tuple(name.split("/")), pattern) for pattern in patterns)]
    return [*filter(is_parquet, found)], [pattern.replace("**/", "*") for pattern in splits[split]]


def choose_fineweb(names: Sequence[str], title: str, subset: str) -> Chosen:
    """Returns the files of a subset of FineWeb-Edu, whose subsets are folders. Without such folders, as in a mirror,
    returns all files."""
    folder = f"sample/{subset[7:]}/" if subset.startswith("sample-") else f"data/{subset}/".replace("default/", "")
    found = [name for name in names if is_parquet(name) and name.startswith(folder)]
    places = [at for name in names if (at := re.match(r"sample/(\w+BT)/|data/(CC-MAIN-[^/]+)/", name))]
    if not found and places:
        known = dict.fromkeys(f"sample-{at[1]}" if at[1] else at[2] for at in places)
        raise _unknown("subset", subset, title, [*known, *(["default"] if any(at[2] for at in places) else [])])
    return found or [*filter(is_parquet, names)], [f"{folder}*"]


def is_parquet(name: str) -> bool:
    return name.lower().endswith(".parquet")


def _unknown(key: str, wanted: str, where: str, known: Iterable[str]) -> DataError:
    names = list(known)
    shown = difflib.get_close_matches(wanted, names, SHOWN, cutoff=0.0)
    more = [f"{len(names) - SHOWN:,} more"] if len(names) > SHOWN else []
    return DataError(f"data.{key}: {where} has no {wanted!r}; it has {', '.join([*shown, *more])}")


def _declared(card: str, title: str) -> Subsets:
    """Returns the subsets that a README declares. The subset marked as the default is also called `default`."""
    block = re.match(r"\ufeff?\s*---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", card, re.DOTALL | re.MULTILINE)
    found: Subsets = {}
    try:
        front = parse_yaml(block[1], LARGEST_FRONT) if block else None
        for config in (front.get("configs") if isinstance(front, dict) else None) or []:
            folder, given = _inside("", str(config.get("data_dir") or "")), config.get("data_files") or {}
            if isinstance(given, list) and any(isinstance(item, Mapping) for item in given):
                given = {str(item["split"]): item["path"] for item in given}
            elif not isinstance(given, Mapping):
                given = {"train": given}
            paths = {str(split): [path] if isinstance(path, str) else path for split, path in given.items()}
            splits = {split: [_inside(folder, path) for path in several] for split, several in paths.items()}
            subset = found[str(config.get("config_name", "default"))] = folder and f"{folder}/", splits
            if config.get("default") is True:
                found.setdefault("default", subset)
        return found
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{title}: `configs` at the top of {CARD} cannot be read: {reason}; download the files and set data.paths"
        ) from None


def _inside(folder: str, path: str) -> str:
    """Joins a folder and a path inside the repository; empty for its root. Raises ValueError for a path outside."""
    joined = PurePosixPath(folder, path)
    if "://" in path or joined.is_absolute() or ".." in joined.parts:
        raise ValueError(f"{path!r} is outside the repository")
    return "/".join(joined.parts)


def _converted(names: Sequence[str]) -> Subsets:
    """Returns the subsets of the hub's parquet conversion; none if any name does not match its layout."""
    places = [re.fullmatch(r"(([^/]+)/([^/]+)/)\d{4}\.parquet", name) for name in names]
    found: Subsets = {}
    for place in places if all(places) else []:
        assert place is not None
        found.setdefault(place[2], ("", {}))[1][place[3]] = [f"{place[1]}*.parquet"]
    return found


def _split_by_name(names: Sequence[str], start: int) -> dict[str, list[str]]:
    """Groups files by split. The first `start` characters of a name are the folder of the subset."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        parts = name[start:].split("/")
        numbered = re.match(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}", parts[-1])
        words = (split for part in parts for split in KEYWORDS if re.search(_WORD.format(KEYWORDS[split]), part))
        if split := numbered[1] if numbered else next(words, None):
            found.setdefault(split, []).append(name)
    return found or ({"train": sorted(names)} if names else {})
