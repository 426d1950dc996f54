"""The page of `nsa doctor`: what fails, the smallest case that shows it, what to do, and the evidence.

`summary` holds everything as plain values and becomes doctor.json; doctor.md is made from it alone.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nsa import __version__
from nsa.checks.doctor import HANG, NON_FINITE, OTHER_NUMBERS, OUT_OF_MEMORY, Attempt, Diagnosis
from nsa.checks.doctor_search import Case, Cause
from nsa.checks.pages import Section, write_files
from nsa.checks.trials import format_command, last_lines
from nsa.config import load_config
from nsa.config.load import flat
from nsa.errors import NSAError, printable
from nsa.inspect.trace_report import explain
from nsa.plain_yaml import parse_yaml
from nsa.record.numbers import clock, one_line, plain, seconds
from nsa.record.schema import HEARTBEAT, read_events, stack_dumps

SCHEMA = 2
JSON_FILE, PAGE_FILE = "doctor.json", "doctor.md"
MAX_FRAMES = 14
LOG_LINES = 15
ENVIRONMENT = ("commit", "python", "platform", "packages", "gpu", "cuda", "driver")

# The format of faulthandler, which writes the stacks.
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+")
_FRAME = re.compile(r'^\s+File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_LONG_PATH = re.compile(r"^.*/(?:site-packages/|(?=nsa/|python3\.\d+/))")
_COMPUTES = re.compile(r"^nsa/(?:ops|nn|parallel)/")

ADVICE = {
    "environment": "fix it first: the table below says what each finding needs.",
    "strategy ddp": "`parallel.ddp.safe_mode=true` shows whether an option of DDP is at fault; "
    "`parallel.strategy=fsdp` avoids it. On GPUs check the links too: `NCCL_DEBUG=INFO`.",
    "strategy fsdp": "`parallel.strategy=ddp` avoids it where the model fits one GPU; "
    "`parallel.fsdp.forward_prefetch=false` and `parallel.fsdp.sharding=grad_op` narrow it down.",
    "checkpointing": "`runtime.gradient_checkpointing={other}` may avoid it, `none` does, for more memory: "
    "`nsa memory` says how much; a smaller `train.micro_batch` saves some.",
    "compile": "`runtime.compile=false` avoids it.",
    "data": "`data.source=synthetic` avoids it. Shards: `nsa data verify FOLDER`; other sources: "
    "`nsa data stats`; `data.workers=0` reads in the training loop, where stacks show it.",
    "batch": "the same model trains with fewer sequences: a smaller `train.micro_batch`, or see `nsa memory`.",
    "branch": "the operators of this branch are at fault, not what is around them: `nsa.force_branch={value}` runs it "
    "alone. Where a kernel is named too, `runtime.kernels` avoids it.",
    "branch mixture": "each branch alone is sound: look at the gates and the mix (`runtime.kernels.mix=reference`).",
    "kernel": "`runtime.kernels.{value}=reference` avoids it, more slowly.",
    "kernel all": "`runtime.kernels.*=reference` for all of phi, cmp, select, sel, win and mix avoids it, more slowly.",
    "layers": "depends on depth: memory, or numbers that grow from layer to layer.",
    "sequence length": "depends on length: memory, or what only long sequences reach, such as a choice of many blocks.",
    "nothing": "No factor makes a difference: one process with one layer and nothing special fails. Read the log.",
}
FOR_KIND = {
    HANG: "Attach the files `stackdump_*` of every rank: they show where each one waits.",
    NON_FINITE: "The non-finite step is kept in the folder below; it can be run again.",
    OUT_OF_MEMORY: "`nsa memory` says what a configuration needs and the largest batch that fits.",
    OTHER_NUMBERS: "It trains, and learns something else: do not start long runs with it.",
}


def write_page(diagnosis: Diagnosis) -> Path:
    """Writes both files and returns the path of the page."""
    folder, found = diagnosis.setup.out, plain(summary(diagnosis))
    page = "\n".join(markdown(found)) + "\n"
    write_files(folder, {JSON_FILE: json.dumps(found, indent=2, allow_nan=False) + "\n", PAGE_FILE: page})
    return folder / PAGE_FILE


def summary(diagnosis: Diagnosis) -> dict[str, Any]:
    """All findings as plain values."""
    setup, failure, evidence = diagnosis.setup, diagnosis.failure, diagnosis.evidence
    env = diagnosis.environment
    return {
        "schema": SCHEMA,
        "nsa": __version__,
        "config": str(setup.config_file),
        "overrides": list(setup.overrides),
        "folder": str(setup.out),
        "time": time.time(),
        "seconds": diagnosis.seconds,
        "healthy": failure is None,
        "verdict": verdict(diagnosis),
        "failure": None if failure is None else asdict(failure),
        "causes": [{**asdict(cause), "advice": _advice(cause, setup.given)} for cause in diagnosis.causes],
        "smallest": None if diagnosis.smallest is None else _smallest(diagnosis, diagnosis.smallest),
        "environment": {name: env[name] for name in ENVIRONMENT if env.get(name)},
        "machine": asdict(diagnosis.machine),
        "kernels": asdict(diagnosis.kernels),
        "trials": [asdict(attempt) for attempt in diagnosis.attempts],
        "evidence": None if evidence is None else _evidence(diagnosis, evidence),
    }


def verdict(diagnosis: Diagnosis) -> str:
    """The outcome in one sentence."""
    failure = diagnosis.failure
    if failure is None:
        trials = sum(attempt.case is not None for attempt in diagnosis.attempts)
        return f"healthy: {trials} trials, {seconds(diagnosis.seconds)}"
    causes = " and ".join(cause.text for cause in diagnosis.causes)
    return f"broken: {failure.name}: {failure.failure}; cause: {causes or 'no single factor, the simplest case fails'}"


def _advice(cause: Cause, given: Case) -> str:
    text = ADVICE.get(f"{cause.factor} {cause.value}") or ADVICE[cause.factor]
    unused = {"strategy": given.strategy != cause.value, "checkpointing": given.checkpointing == "none"}
    note = " The configuration as given does not use it." if unused.get(cause.factor) else ""
    return text.format(value=cause.value, other="branch" if cause.value == "block" else "block") + note


def _smallest(diagnosis: Diagnosis, case: Case) -> dict[str, Any]:
    setup, evidence = diagnosis.setup, diagnosis.evidence
    stated = flat(load_config(setup.config_file, list(setup.overrides)).to_dict())  # without environment variables
    wanted = {**flat(setup.config.to_dict()), **setup.changes(case, setup.limit_s)}
    changed = {key: _format_value(value) for key, value in wanted.items() if stated.get(key) != value}
    changed["train.out_dir"] = str(setup.out / "again")
    kept = [text for text in setup.overrides if text.partition("=")[0].strip() not in changed]
    nproc, overrides = setup.processes(case), (*kept, *(f"{key}={value}" for key, value in changed.items()))
    return {
        "factors": {**asdict(case), "nproc": nproc},
        "command": format_command(setup.config_file, nproc, overrides),
        "reproduced": None if evidence is None else bool(evidence.failure),
    }


def _format_value(value: Any) -> str:
    """The value of an override: bare where YAML reads it back unchanged."""
    bare = value if isinstance(value, str) else json.dumps(value)
    return bare if parse_yaml(bare) == value else json.dumps(value)


def _evidence(diagnosis: Diagnosis, traced: Attempt) -> dict[str, Any]:
    """Of the traced run; where it passed this time, of the newest run that failed."""
    failed = [
        a for a in diagnosis.attempts if a.folder and diagnosis.failure and a.failure == diagnosis.failure.failure
    ]
    shown = traced if traced.failure or not failed else failed[-1]
    baseline, names = diagnosis.baseline, ("step", "loss", "baseline_loss", "grad_norm", "baseline_grad_norm")
    rows = zip(shown.losses, baseline.losses, shown.grad_norms, baseline.grad_norms, strict=False) if baseline else ()
    return {
        **asdict(shown),
        "hangs": hang_events(Path(shown.folder)),
        "stacks": stacks(Path(shown.folder)),
        "trace": _explain_trace(Path(traced.folder)),
        "log": [printable(line[:300]).rstrip() for line in last_lines(Path(f"{shown.folder}.log"), LOG_LINES)],
        "numbers": [dict(zip(names, (step, *row), strict=True)) for step, row in enumerate(rows, start=1)],
    }


def hang_events(folder: Path) -> list[dict[str, Any]]:
    """The newest `hang` event of every rank that has one."""
    hangs = ([e for e in read_events(folder, rank) if e["event"] == "hang"] for rank in HEARTBEAT.find(folder))
    return [events[-1] for events in hangs if events]


def stacks(folder: Path) -> list[dict[str, Any]]:
    """By rank: the main thread with the newest frame first, and other threads that were computing."""
    found = []
    for rank, path in stack_dumps().find(folder).items():
        threads = _threads(path.read_text(encoding="utf-8", errors="replace"))
        mains = [frames for frames in threads if frames[-1].endswith(" <module>") or "runpy" in frames[-1]]
        if mains:
            # Without the calls that lead to the command, which are the same in every stack.
            end = next((at for at, frame in enumerate(mains[-1]) if frame.startswith("nsa/cli/")), None)
            others = [frames for frames in threads if frames not in mains and any(map(_COMPUTES.match, frames))]
            found.append({"rank": rank, "file": path.name, "frames": mains[-1][:end], "computing": others[-2:]})
    return found


def _threads(text: str) -> list[list[str]]:
    """The stacks of a dump, each frame as `file:line function`."""
    threads: list[list[str]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append(f"{_LONG_PATH.sub('', frame['path'])}:{frame['line']} {frame['name']}")
    return [frames for frames in threads if frames]


def _explain_trace(folder: Path) -> list[str]:
    try:
        return list(explain(folder))
    except (NSAError, ValueError):  # it ended before it traced anything
        return []


def markdown(found: Mapping[str, Any]) -> Iterator[str]:
    command = " ".join([found["config"], *found["overrides"]])
    yield from (f"# nsa doctor: {'healthy' if found['healthy'] else 'broken'}", "", f"**{one_line(found['verdict'])}**")
    yield from ("", f"`{command}`, {clock(found['time'])}, {seconds(found['seconds'])} in all.")
    if not found["healthy"]:
        yield from _failure(found)
    rows = [
        [t["name"], t["failure"] or "ok", seconds(t["seconds"]), describe_case(t["case"], t["nproc"]), t["reason"]]
        for t in found["trials"]
    ]
    yield from Section("Trials", ["trial", "outcome", "time", "what was run", "remark"], rows).markdown()
    bad = [finding for finding in found["machine"]["findings"] if not finding["ok"]]
    if bad:
        rows = [[finding[name] for name in ("what", "found", "advice")] for finding in bad]
        yield from Section("Environment guard", ["what", "found", "what to do"], rows).markdown()
    yield from _wrong_kernels(found["kernels"]["findings"])
    if found["evidence"]:
        yield from _shown(found["evidence"])
    yield from ("", "## Environment", "", f"- nsa: {found['nsa']}")
    for name, value in found["environment"].items():
        packages = ", ".join(f"{k} {v}" for k, v in value.items() if v) if isinstance(value, dict) else value
        yield f"- {name}: {one_line(str(packages), 300)}"


def _failure(found: Mapping[str, Any]) -> Iterator[str]:
    failure, smallest = found["failure"], found["smallest"]
    yield from ("", f"In '{failure['name']}': {one_line(failure['reason'], 600)}")
    if smallest:
        yield from ("", "The smallest configuration that shows it:", "", "```bash", smallest["command"], "```")
        if smallest["reproduced"] is False:
            yield from ("", "It passed when it ran once more: the failure is **not reproducible every time**.")
    yield from ("", "## What to do", "")
    yield from (f"- **{cause['text']}**: {cause['advice']}" for cause in found["causes"])
    if not found["causes"]:
        yield f"- {ADVICE['nothing']}"
    if failure["failure"] in FOR_KIND:
        yield f"- {FOR_KIND[failure['failure']]}"
    yield "- Attach this page to an issue. Run `nsa doctor` again after the fix: it stops at the first fault."


def describe_case(case: Mapping[str, Any] | None, nproc: int) -> str:
    """The factors of a case that differ from the simplest values."""
    if not case:
        return ""
    simplest = plain(asdict(Case(0, 0)))
    words = [f"{name} {_number(value)}" for name, value in case.items() if value != simplest[name]]
    return ", ".join([*words, f"{nproc} processes"] if nproc > 1 else words)


def _wrong_kernels(checks: list[dict[str, Any]]) -> Iterator[str]:
    wrong = dict.fromkeys(check["operator"] for check in checks if not check["ok"])
    if not wrong:
        return
    rows = [
        [c["operator"], c["backend"], c["part"], _number(c["error"]) + ("" if c["ok"] else " **wrong**"), c["limit"]]
        for c in checks
        if c["operator"] in wrong
    ]
    yield from Section("Wrong kernels", ["operator", "backend", "part", "error", "allowed"], rows).markdown()
    for operator in wrong:
        slopes = [c["ok"] for c in checks if c["operator"] == operator and "differences" in c["part"]]
        agrees = "agrees with finite differences: the fault is in the kernel"
        if slopes:
            yield from ("", f"{operator}: the reference {agrees if all(slopes) else 'contradicts finite differences'}.")


def _shown(evidence: Mapping[str, Any]) -> Iterator[str]:
    outcome = f"Of '{evidence['name']}', in `{evidence['folder']}`: {evidence['failure'] or 'ok'}."
    yield from ("", "## Evidence", "", outcome)
    if evidence["reason"]:
        yield from ("", one_line(evidence["reason"], 600))
    if evidence["numbers"]:
        rows = [[_number(value) for value in step.values()] for step in evidence["numbers"]]
        head = ["step", "loss", "it should be", "gradient norm", "it should be"]
        yield from Section("Losses and gradient norms", head, rows).markdown(3)
    hangs = evidence["hangs"]
    if hangs:
        names: tuple[str, ...] = ("rank", "step", "phase", "silent_s", "limit_s", "reported_by")
        yield from Section("Hangs", names, [[_number(h.get(name, "")) for name in names] for h in hangs]).markdown(3)
        states = hangs[0].get("ranks") or []
        names = ("rank", "step", "event", "age_s", "pid", "host", "state")
        rows = [[_number(state.get(name, "")) for name in names] for state in states]
        yield from Section("Where each rank stood", names, rows).markdown(3)
    for stack in evidence["stacks"]:
        title, frames = f"Rank {stack['rank']}, main thread, newest call first ({stack['file']})", stack["frames"]
        yield from Section(title, lines=frames[:MAX_FRAMES]).markdown(3)
        for frames in stack["computing"]:
            yield from Section(f"Rank {stack['rank']}, a computing thread", lines=frames[:MAX_FRAMES]).markdown(3)
    for title, lines in (("The trace (`nsa trace`)", evidence["trace"]), ("The end of the log", evidence["log"])):
        if lines:
            yield from Section(title, lines=lines).markdown(3)


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
