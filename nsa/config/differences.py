"""How two configurations differ, for people."""

from typing import Any

from nsa.config.schema import Config


def differences(stored: Any, config: Config) -> list[str]:
    """A line for every key whose value is another one than in `stored`, a configuration as plain data.

    train.out_dir does not count: a run may be moved as a whole.
    """
    return _compare(stored, config.to_dict(), "")


def _compare(stored: Any, wanted: dict[str, Any], prefix: str) -> list[str]:
    lines: list[str] = []
    stored = stored if isinstance(stored, dict) else {}
    for key, value in wanted.items():
        name = f"{prefix}{key}"
        if name == "train.out_dir":
            continue
        if isinstance(value, dict):
            lines += _compare(stored.get(key), value, f"{name}.")
        elif key not in stored:
            lines.append(f"{name}: not known then, {value!r} now")
        elif stored[key] != value:
            lines.append(f"{name}: {stored[key]!r} then, {value!r} now")
    return lines
