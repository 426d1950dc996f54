"""Sources and tokenizers as a configuration names them. Needs no torch: commands about data start quickly."""

from nsa.config.schema import DataConfig, SourceConfig
from nsa.data.sources.base import Source
from nsa.data.sources.python import PythonSource
from nsa.data.sources.text import TextSource
from nsa.data.tokenizers import Tokenizer, load_tokenizer
from nsa.errors import ConfigError


def tokenizer_for(data: DataConfig) -> Tokenizer:
    return load_tokenizer(data.tokenizer, path=data.tokenizer_path, separator=data.separator)


def open_source(source: SourceConfig, timeout_s: float = 300.0) -> Source:
    """The documents of a source that has any: not synthetic, not prepared."""
    if source.source == "python":
        return PythonSource()
    if source.source == "text":
        return TextSource(source.paths, source.text_field)
    if source.source == "fineweb_edu":
        from nsa.data.sources.fineweb import FineWebEdu

        return FineWebEdu(source.subset, source.revision, source.paths, source.text_field, timeout_s)
    raise ConfigError(f"data.source: {source.source!r} has no documents to read; choose python, text or fineweb_edu")
