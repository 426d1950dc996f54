"""Prints the lowest version of every dependency that pyproject.toml allows, as constraints for pip."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads(Path(__file__).resolve().parents[1].joinpath("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for requirement in [*project["dependencies"], *extras["train"], *extras["hf"]]:
    if found := re.match(r"([A-Za-z0-9_-]+)>=([0-9.]+)", requirement):
        print(f"{found[1]}=={found[2]}")
