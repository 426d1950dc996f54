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
    if source.source == "fineweb_edu":
        from nsa.data.sources.fineweb import FineWebEdu

        return FineWebEdu(source.subset, source.revision, source.paths, source.text_field, deadline_s)
    if source.source == "hub":
        from nsa.data.sources.dataset import HubDataset
        from nsa.data.sources.layout import HubLayout

        repo, layout = source.repo or "the repository", HubLayout(source.subset, source.split)
        name = " ".join([source.repo or "hub", *([source.subset] if source.subset != "default" else [])])
        return HubDataset(name, repo, layout, source.revision, source.paths, source.text_field, deadline_s)
    raise ConfigError(
        f"data.source: {source.source!r} has no documents to read; choose python, text, fineweb_edu or hub"
    )
