"""Inspects the machine or the kernels in a separate process, so that a crash or a hang ends only the probe.

`python -m nsa.checks.probe machine|kernels CONFIG NPROC FOLDER OUT_DIR RESULT` writes its findings as JSON. OUT_DIR may
be empty.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nsa.checks.trials import Trial, environment, write_trial_config
from nsa.config import Config, load_config
from nsa.errors import NSAError
from nsa.files import expand_home

NOT_CHECKED = "not checked"  # instead of findings, if the probe has a problem


@dataclass(frozen=True)
class ProbeResult:
    """The `findings` that the probe wrote, or the `problem` if it did not finish."""

    findings: list[dict[str, Any]]
    problem: str = ""

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [finding for finding in self.findings if not finding["ok"]]


def run_probe(kind: str, trial: Trial) -> ProbeResult:
    """Inspects the machine or the kernels for a trial."""
    write_trial_config(trial)
    folder = trial.folder.parent
    result = folder / f"{kind}.json"
    folders = [str(folder), trial.config.train.out_dir or ""]
    command = [sys.executable, "-m", __name__, kind, str(trial.config_file), str(trial.nproc), *folders, str(result)]
    result.unlink(missing_ok=True)
    try:
        ended = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, errors="replace", timeout=trial.limit_s, env=environment()
        )
    except subprocess.TimeoutExpired:
        return ProbeResult([], f"no answer after {trial.limit_s:g} s")
    if ended.returncode:
        lines = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
        return ProbeResult([], lines[-1] if lines else f"exit code {ended.returncode} without output")
    return ProbeResult(json.loads(result.read_text(encoding="utf-8")))


def describe(finding: dict[str, Any]) -> str:
    """Formats a finding of either kind as one line."""
    if "what" in finding:
        return f"{finding['what']}: {finding['found']}"
    part = f"{finding['operator']} ({finding['backend']}): {finding['part']}"
    return f"{part} is off by {finding['error']:.1e}, {finding['limit']:.0e} is allowed"


def find(kind: str, config: Config, nproc: int, folders: list[Path]) -> list[dict[str, Any]]:
    """Returns the findings as plain values."""
    if kind == "machine":
        from nsa.checks.machine import inspect_machine
        from nsa.data.tokenizers import tokenizer_for

        vocab_size = tokenizer_for(config.data).vocab_size
        return [asdict(finding) for finding in inspect_machine(config, nproc, folders, vocab_size)]
    from nsa.checks.kernels import check_kernels
    from nsa.parallel.world import pick_device

    return [{**asdict(check), "ok": check.ok} for check in check_kernels(config, pick_device(config.runtime.device))]


def main(kind: str, config_file: str, nproc: str, folder: str, out_dir: str, result: str) -> int:
    folders = [Path(folder), *([expand_home(out_dir)] if out_dir else [])]
    try:
        found = find(kind, load_config(config_file), int(nproc), folders)
    except NSAError as error:
        print(error)
        return error.exit_code
    Path(result).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
