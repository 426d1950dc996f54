"""Sources as a configuration names them."""

from nsa.config.schema import SourceConfig
from nsa.data.sources.base import Source
from nsa.data.sources.text import PythonSource, TextSource
from nsa.errors import ConfigError


def open_source(source: SourceConfig, deadline_s: float) -> Source:
    """The documents of a source that has any: not synthetic, not prepared."""
    if source.source == "python":
        return PythonSource()
    if source.source == "text":
        return TextSource(source.paths, source.text_field)
    if source.source in ("fineweb_edu", "hub"):
        from nsa.data.sources.dataset import HubDataset
        from nsa.data.sources.layout import FINEWEB_EDU, FineWebLayout, HubLayout

        layout = HubLayout(source.subset, source.split)
        repo = source.repo or "the repository"
        name = " ".join([source.repo or "hub", *([source.subset] if source.subset != "default" else [])])
        if source.source == "fineweb_edu":
            name, repo, layout = "fineweb_edu", FINEWEB_EDU, FineWebLayout(source.subset)
        return HubDataset(name, repo, layout, source.revision, source.paths, source.text_field, deadline_s)
    raise ConfigError(
        f"data.source: {source.source!r} has no documents to read; choose python, text, fineweb_edu or hub"
    )
