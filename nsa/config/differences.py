"""The differences between two configurations, as lines of text."""

from collections.abc import Mapping
from typing import Any

from nsa.config.schema import Config, MixturePart


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key such as `train.steps`, in the order of the schema."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _filled(defaults: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """`stored` with the defaults of what it lacks."""
    sections = [key for key, value in defaults.items() if isinstance(value, dict) and isinstance(stored.get(key), dict)]
    return defaults | stored | {key: _filled(defaults[key], stored[key]) for key in sections}


def differences(stored: Any, config: Config) -> list[str]:
    """One line for every key whose value differs from `stored`, a configuration as plain data.

    train.out_dir is ignored: the folder of a run may be moved. A key that an earlier version did not know had the
    effect of its default.
    """
    then = flat(_filled(Config().to_dict(), stored)) if isinstance(stored, dict) else {}
    mixture = then.get("data.mixture")
    if isinstance(mixture, list):
        then["data.mixture"] = [
            MixturePart().model_dump() | part if isinstance(part, dict) else part for part in mixture
        ]
    return [
        f"{name}: {repr(then[name]) if name in then else 'not known'} then, {value!r} now"
        for name, value in flat(config.to_dict()).items()
        if name != "train.out_dir" and (name not in then or then[name] != value)
    ]
