"""Configurations: the schema, and a loader for YAML files with overrides. Needs neither torch nor a GPU."""

from nsa.config.load import differences, load_config, parse_config, shipped_names
from nsa.config.schema import Config

__all__ = ["Config", "differences", "load_config", "parse_config", "shipped_names"]
