"""A look at the machine or at the kernels in a process of its own: one that crashes or hangs takes nobody with it.

`python -m nsa.checks.probe machine|kernels CONFIG NPROC FOLDER RESULT` writes its findings as JSON.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nsa.checks.trials import environment
from nsa.config import Config, load_config
from nsa.errors import NSAError

KINDS = ("machine", "kernels")


@dataclass(frozen=True)
class Probed:
    """`findings` as the probe wrote them; `problem` where it did not come to its end."""

    findings: list[dict[str, Any]]
    problem: str = ""


def run_probe(kind: str, config_file: Path, nproc: int, folder: Path, limit_s: float) -> Probed:
    """Starts the probe and waits for its findings."""
    result = folder / f"{kind}.json"
    command = [sys.executable, "-m", __name__, kind, str(config_file), str(nproc), str(folder), str(result)]
    result.unlink(missing_ok=True)
    try:
        ended = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, errors="replace", timeout=limit_s, env=environment()
        )
    except subprocess.TimeoutExpired:
        return Probed([], f"no answer after {limit_s:g} s")
    if ended.returncode:
        lines = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
        return Probed([], lines[-1] if lines else f"exit code {ended.returncode} without a word")
    return Probed(json.loads(result.read_text(encoding="utf-8")))


def in_words(finding: dict[str, Any]) -> str:
    """What was found, of either kind, in a line."""
    if "what" in finding:
        return f"{finding['what']}: {finding['found']}"
    error, limit = finding["error"], finding["limit"]
    of = f"{finding['operator']} ({finding['backend']}): {finding['part']}"
    return f"{of} is off by {error:.1e}, {limit:.0e} is allowed"


def look(kind: str, config: Config, nproc: int, folder: Path) -> list[dict[str, Any]]:
    """What the probe finds, as plain values."""
    if kind == "machine":
        from nsa.checks.machine import inspect_machine
        from nsa.data.tokenizers import tokenizer_for

        vocab_size = tokenizer_for(config.data).vocab_size
        return [asdict(finding) for finding in inspect_machine(config, nproc, folder, vocab_size)]
    from nsa.checks.kernels import check_kernels
    from nsa.parallel.launch import pick_device

    checks = check_kernels(config, pick_device(config.runtime.device))
    return [{**asdict(check), "ok": check.ok} for check in checks]


def main(arguments: list[str]) -> int:
    kind, config_file, nproc, folder, result = arguments
    assert kind in KINDS
    try:
        found = look(kind, load_config(config_file), int(nproc), Path(folder))
    except NSAError as error:
        print(error)
        return error.exit_code
    Path(result).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
