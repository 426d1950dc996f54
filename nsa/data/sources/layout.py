"""Which parquet files of a dataset repository belong to a subset and a split, by the hub's own conventions.

1. `configs` in the YAML block at the top of README.md names subsets, splits and patterns of files.
2. SUBSET/SPLIT/0000.parquet everywhere: the branch refs/convert/parquet, where the hub keeps copies as parquet.
3. Otherwise the whole repository is the subset `default`, and a folder is the subset of its name. Splits follow from
   names: SPLIT-00000-of-00005.parquet, else train, validation or test in a folder's name, else in a file's name.
   Without any of these all files are `train`.
"""

import difflib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import has_magic
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Any, TypeVar

import yaml

from nsa.data.sources.repository import CARD, Repository
from nsa.data.sources.text import matches
from nsa.errors import DataError

T = TypeVar("T")
CONVERTED = "refs/convert/parquet"
FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
LARGEST_FRONT = 2**22  # characters of the YAML at the top of a README
KEYWORDS = {  # between characters that are no letters
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
SHOWN = 12  # names in a message


@dataclass(frozen=True)
class Chosen:
    """Names of files, and patterns with which `hf download --include` gets all of them."""

    names: list[str]
    include: list[str]


@dataclass(frozen=True)
class Subset:
    """`splits` holds patterns by name; None where splits follow from the names of the files below `folder`."""

    folder: str = ""
    splits: Mapping[str, Sequence[str]] | None = None
    is_default: bool = False


class HubLayout:
    """One subset and split of any repository."""

    def __init__(self, subset: str = "default", split: str = "train"):
        self.subset, self.split = subset, split

    @property
    def needs(self) -> Sequence[str]:
        """Patterns of files that the choice itself depends on."""
        return [CARD]

    def choose(self, repository: Repository) -> Chosen:
        """Raises a `DataError` that lists what there is to choose from."""
        title = repository.title
        subsets = _declared(repository.card(), title)
        names: list[str] = []
        if not subsets:
            names = _visible(repository.below(""))
            subsets = _converted(names) or _folders(names)
        subset = self._pick(subsets, title)
        if subset.splits is None:
            splits = _split_by_name(names or _visible(repository.below(subset.folder)), subset.folder)
            return self._split_of(splits, title)
        patterns = self._split_of(subset.splits, title)
        found = _matching(repository, patterns)
        parquet = [name for name in found if is_parquet(name)]
        if not parquet and repository.kind != "cache":  # of which some may be missing
            held = f"holds {_kinds(found)}" if found else f"matches no file with {_listed(patterns)}"
            raise DataError(f"{title}: split {self.split!r} of subset {self.subset!r} {held}, no parquet; {_REMEDY}")
        return Chosen(parquet, [pattern.replace("**/", "*") for pattern in patterns])

    def _pick(self, subsets: Mapping[str, Subset], title: str) -> Subset:
        chosen = subsets.get(self.subset)
        if chosen is None and self.subset == "default":
            candidates = [subset for subset in subsets.values() if subset.is_default] or list(subsets.values())
            chosen = candidates[0] if len(candidates) == 1 else None
        if chosen is None:
            raise self._unknown(title, subsets)
        return chosen

    def _unknown(self, title: str, subsets: Iterable[str]) -> DataError:
        return DataError(f"data.subset: {title} has no {self.subset!r}; it has {_listed(subsets, self.subset)}")

    def _split_of(self, splits: Mapping[str, T], title: str) -> T:
        if not splits:
            raise DataError(f"{title}: subset {self.subset!r} holds no .parquet file; {_REMEDY}")
        if self.split not in splits:
            known = _listed(splits, self.split)
            raise DataError(f"data.split: subset {self.subset!r} of {title} has no {self.split!r}; it has {known}")
        return splits[self.split]


class FineWebLayout(HubLayout):
    """FineWeb-Edu, whose subsets are known: they are folders, and a part of it needs no README. A mirror may also be a
    folder of files, whatever its name."""

    @property
    def needs(self) -> Sequence[str]:
        folder = _fineweb_folder(self.subset)
        if folder is None:
            raise DataError(
                f"data.subset: {self.subset!r} is not a subset of {FINEWEB_EDU}; name sample-10BT, sample-100BT, "
                "sample-350BT, a crawl such as CC-MAIN-2024-10, or default for all"
            )
        return [f"{folder}/*"]

    def choose(self, repository: Repository) -> Chosen:
        folder = _fineweb_folder(self.subset)
        names = repository.below(folder) if folder else []
        if not any(map(is_parquet, names)) and repository.kind != "cache":
            names = repository.below("")
            samples = sorted({f"sample-{at[1]}" for name in names if (at := re.match(r"sample/(\w+BT)/", name))})
            crawls = sorted({at[1] for name in names if (at := re.match(r"data/(CC-MAIN-[^/]+)/", name))}, reverse=True)
            # In a mirror of the repository another subset must not be mistaken for the one that is configured.
            if samples or crawls or repository.kind == "hub":
                raise self._unknown(repository.title, [*samples, *(["default"] if crawls else []), *crawls])
        return Chosen(sorted(filter(is_parquet, names)), [f"{folder}/*"])


_REMEDY = (
    f"try data.revision={CONVERTED}, where the hub keeps a copy of most repositories as parquet, or download the files "
    "and set data.source=text"
)


def is_parquet(name: str) -> bool:
    return name.lower().endswith(".parquet")


def _visible(names: Iterable[str]) -> list[str]:
    """The parquet files that are not hidden, and lie in no hidden folder."""
    return [name for name in names if is_parquet(name) and not any(part.startswith(".") for part in name.split("/"))]


def _declared(card: str, title: str) -> dict[str, Subset]:
    """The subsets that a README declares; none where it declares nothing."""
    block = re.match(r"\ufeff?\s*---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", card, re.DOTALL | re.MULTILINE)
    if block is None:
        return {}
    try:
        front = _front_matter(block[1])
        configs = (front.get("configs") if isinstance(front, dict) else None) or []
        return {_plain(config.get("config_name", "default")): _declared_subset(config) for config in configs}
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{title}: `configs` at the top of {CARD} cannot be read: {reason}; download the files and set data.paths"
        ) from None


def _front_matter(text: str) -> Any:
    """Thousands of lines at times, for which nsa.plain_yaml is too slow; what a few bytes multiply is refused as there.
    Raises yaml.YAMLError, ValueError or RecursionError."""
    if len(text) > LARGEST_FRONT:
        raise ValueError(f"it has {len(text):,} characters, more than {LARGEST_FRONT:,}")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("an alias (*) is not read")
        if isinstance(event, yaml.ScalarEvent) and (
            (event.value == "<<" and event.implicit[0]) or event.tag == "tag:yaml.org,2002:merge"
        ):
            raise ValueError("a merge key (<<) is not read")
    return yaml.load(text, Loader=loader)  # noqa: S506  (a safe one)


def _declared_subset(config: Mapping[str, Any]) -> Subset:
    folder = _inside("", _plain(config.get("data_dir") or ""))
    is_default = config.get("default") is True
    given = config.get("data_files")
    if given is None:
        return Subset(folder, is_default=is_default)
    if isinstance(given, list) and any(isinstance(item, Mapping) for item in given):
        given = {_plain(item["split"]): item["path"] for item in given}
    elif not isinstance(given, Mapping):
        given = {"train": given}
    patterns = {}
    for split, paths in given.items():
        patterns[str(split)] = [_inside(folder, path) for path in ([paths] if isinstance(paths, str) else paths)]
    return Subset(folder, patterns, is_default)


def _plain(value: Any) -> str:
    """A text, or a number or date without quotation marks. A list could stand for more text than there is memory."""
    if isinstance(value, Collection) and not isinstance(value, str):
        raise TypeError("a name is not a text")
    return str(value)


def _inside(folder: str, path: str) -> str:
    """Empty for the top of the repository."""
    joined = PurePosixPath(folder, path)
    if "://" in path or joined.is_absolute() or ".." in joined.parts:
        raise ValueError(f"{path!r} is outside the repository")
    return "/".join(joined.parts)


def _converted(names: Sequence[str]) -> dict[str, Subset]:
    """The subsets of the hub's own copy; none where this is not one."""
    found: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for name in names:
        place = re.fullmatch(r"([^/]+)/([^/]+)/\d{4}\.parquet", name)
        if place is None:
            return {}
        found[place[1]][place[2]] = [f"{place[1]}/{place[2]}/*.parquet"]
    return {subset: Subset(splits=splits) for subset, splits in found.items()}


def _folders(names: Sequence[str]) -> dict[str, Subset]:
    folders = {str(folder) for name in names for folder in PurePosixPath(name).parents}
    return {"default": Subset()} | {folder: Subset(folder) for folder in sorted(folders - {"."})}


def _split_by_name(names: Sequence[str], folder: str) -> dict[str, Chosen]:
    """The splits of the files below a folder."""
    start = f"{folder}/" if folder else ""
    inner = {name[len(start) :]: name for name in sorted(names) if name.startswith(start)}
    numbered: dict[str, Chosen] = {}
    data = "(?:data/)?" if folder else "data/"
    for short, name in inner.items():
        if place := re.fullmatch(rf"({data}(\w+(?:\.\w+)*)-)\d{{5}}-of-\d{{5}}.*\.parquet", short, re.IGNORECASE):
            numbered.setdefault(place[2], Chosen([], [f"{start}{place[1]}*"])).names.append(name)
    if numbered:
        return numbered
    everything = [f"{start}*.parquet"]
    for part in (slice(None, -1), slice(-1, None)):  # names of folders, then of files
        found = {}
        for split, words in KEYWORDS.items():
            word = re.compile(rf"(?:^|[-._ 0-9])(?:{words})(?:$|[-._ 0-9])")
            those = [name for short, name in inner.items() if any(map(word.search, short.split("/")[part]))]
            if those:
                found[split] = Chosen(those, everything)
        if found:
            return found
    return {"train": Chosen(list(inner.values()), everything)} if inner else {}


def _matching(repository: Repository, patterns: Sequence[str]) -> list[str]:
    """The files that match a pattern, of which only the folder before the first wildcard is listed."""
    by_folder: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for pattern in patterns:
        parts = PurePosixPath(pattern).parts
        fixed = list(takewhile(lambda part: not has_magic(part), parts[:-1]))
        by_folder["/".join(fixed)].append(parts)
    found = set()
    for folder, wanted in by_folder.items():
        exact = {parts for parts in wanted if not has_magic("/".join(parts))}
        wild = [parts for parts in wanted if parts not in exact]
        for name in repository.below(folder):
            parts = tuple(name.split("/"))
            if parts in exact or any(matches(parts, pattern) for pattern in wild):
                found.add(name)
    return sorted(found)


def _kinds(names: Iterable[str]) -> str:
    return _listed(sorted({"".join(PurePosixPath(name).suffixes[-2:]) or "files without a suffix" for name in names}))


def _listed(names: Iterable[str], wanted: str = "") -> str:
    """A few names, those like `wanted` first. They come from a server: none may act on a terminal."""
    every = [name if name.isprintable() else ascii(name) for name in names]
    close = difflib.get_close_matches(wanted, every, n=3)
    shown = [*close, *(name for name in every if name not in close)][:SHOWN]
    more = [f"{len(every) - SHOWN:,} more"] if len(every) > SHOWN else []
    return ", ".join([*shown, *more]) or "none"


def _fineweb_folder(subset: str) -> str | None:
    """The repository's folder for a subset; None for a name that no subset can have."""
    if subset == "default":
        return "data"
    if sample := re.fullmatch(r"sample-(\w+)", subset):
        return f"sample/{sample[1]}"
    return f"data/{subset}" if re.fullmatch(r"CC-MAIN-[\w-]+", subset) else None
