"""Opens the source that a configuration names."""

from nsa.config.schema import SourceConfig
from nsa.data.sources.base import Source
from nsa.data.sources.text import PythonSource, TextSource
from nsa.errors import ConfigError


def open_source(source: SourceConfig, deadline_s: float) -> Source:
    """Opens a source of text: not synthetic, recall, prepared, megatron, datatrove or chat."""
    if source.source == "python":
        return PythonSource()
    if source.source == "text":
        return TextSource(source.paths, source.text_field)
    if source.source in ("fineweb_edu", "hub"):
        from nsa.data.sources.dataset import HubDataset

        return HubDataset(source, deadline_s)
    raise ConfigError(f"data.source: {source.source!r} has no text to read; choose python, text, fineweb_edu or hub")
