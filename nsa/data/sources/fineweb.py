"""FineWeb-Edu: a dataset of the hub whose subsets are known, so that a part of it needs no README."""

import re
from collections.abc import Sequence

from nsa.data.sources.dataset import HubDataset
from nsa.data.sources.layout import Chosen, is_parquet
from nsa.data.sources.repository import Repository
from nsa.errors import DataError

REPO = "HuggingFaceFW/fineweb-edu"


class FineWebEdu(HubDataset):
    def __init__(
        self,
        subset: str = "sample-10BT",
        revision: str = "main",
        paths: Sequence[str] = (),
        text_field: str = "text",
        deadline_s: float = 60.0,
    ):
        super().__init__("fineweb_edu", REPO, FineWebLayout(subset), revision, paths, text_field, deadline_s)


class FineWebLayout:
    """A subset is a folder. A mirror may also be a folder of files, whatever its name."""

    def __init__(self, subset: str):
        self.subset = subset

    @property
    def needs(self) -> Sequence[str]:
        folder = subset_folder(self.subset)
        if folder is None:
            raise DataError(
                f"data.subset: {self.subset!r} is not a subset of {REPO}; name sample-10BT, sample-100BT, "
                "sample-350BT, a crawl such as CC-MAIN-2024-10, or default for all"
            )
        return [f"{folder}/*"]

    def choose(self, repository: Repository) -> Chosen:
        folder = subset_folder(self.subset)
        names = repository.below(folder) if folder else []
        if not any(map(is_parquet, names)) and repository.kind != "cache":
            # In a mirror of the repository another subset must not be mistaken for the one that is configured.
            folders = {name.rpartition("/")[0] for top in ("sample", "data") for name in repository.below(top)}
            others = sorted(other for other in folders if re.fullmatch(r"sample/\w+BT|data/CC-MAIN-[^/]+", other))
            if others or repository.kind == "hub":
                raise _unknown_subset(self.subset, repository.title, others)
            names = repository.below("")
        return Chosen(sorted(filter(is_parquet, names)), [f"{folder}/*"])


def subset_folder(subset: str) -> str | None:
    """The repository's folder for a subset; None for a name that no subset can have."""
    if subset == "default":
        return "data"
    if sample := re.fullmatch(r"sample-(\w+)", subset):
        return f"sample/{sample[1]}"
    return f"data/{subset}" if re.fullmatch(r"CC-MAIN-[\w-]+", subset) else None


def _unknown_subset(subset: str, where: str, folders: Sequence[str]) -> DataError:
    samples = sorted(f.replace("sample/", "sample-") for f in folders if f.startswith("sample/"))
    crawls = sorted(f.removeprefix("data/") for f in folders if f.startswith("data/"))
    shown = crawls if len(crawls) <= 8 else [*crawls[:3], f"{len(crawls) - 6} more crawls", *crawls[-3:]]
    names = ", ".join([*samples, *shown, *(["default (all crawls)"] if crawls else [])])
    return DataError(f"data.subset: {where} has no {subset!r}; it has {names or 'no subsets at all'}")
