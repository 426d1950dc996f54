"""The page of `nsa doctor`: what fails, in which smallest case, what to do, and the evidence, for a person or an issue.

`summary` is everything as plain values, written as doctor.json; doctor.md is made from nothing else.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from nsa import __version__
from nsa.checks.doctor import HANG, NON_FINITE, OTHER_NUMBERS, OUT_OF_MEMORY, Diagnosis, Record, timed
from nsa.checks.doctor_search import AS_GIVEN, Case, Guilty
from nsa.checks.trials import spelled
from nsa.checks.writing import block, row, table_head, write_files
from nsa.config.differences import flat
from nsa.errors import ConfigError
from nsa.inspect.reading import read_run
from nsa.inspect.trace_report import explain
from nsa.record.numbers import clock, one_line, plain, seconds
from nsa.record.schema import stack_dumps

SCHEMA = 1
JSON_FILE, PAGE_FILE = "doctor.json", "doctor.md"
MOST_FRAMES = 14
LOG_LINES = 15

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+")
_FRAME = re.compile(r'^\s+File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_LONG_PATH = re.compile(r"^.*/(?:site-packages/|(?=nsa/|python3\.\d+/))")
_COMPUTES = re.compile(r"^nsa/(?:ops|nn|parallel)/")

ADVICE = {
    "environment": "mend it first: the table below says what each finding asks for.",
    "strategy ddp": "`parallel.ddp.safe_mode=true` tells whether an option of DDP is at fault; "
    "`parallel.strategy=fsdp` goes around it. On GPUs look at the links too: `NCCL_DEBUG=INFO`.",
    "strategy fsdp": "`parallel.strategy=ddp` goes around it where the model fits one card; "
    "`parallel.fsdp.forward_prefetch=false` and `parallel.fsdp.sharding=grad_op` narrow it down.",
    "checkpointing": "`runtime.gradient_checkpointing={other}` may go around it, `none` does, for more memory: "
    "`nsa memory` says how much; a smaller `train.micro_batch` gives some back.",
    "compile": "`runtime.compile=false` goes around it.",
    "data": "`data.source=synthetic` goes around it. Shards: `nsa data verify FOLDER`; other sources: "
    "`nsa data stats`; `data.workers=0` reads in the training loop itself, where stacks show it.",
    "batch": "the same model trains with fewer sequences: a smaller `train.micro_batch`, or see `nsa memory`.",
    "branch": "the operators of this branch are at fault, not what is around them: `nsa.force_branch={value}` shows it "
    "alone. Where a kernel is named too, `runtime.kernels` goes around it.",
    "mixture": "each branch alone is sound: look at the gates and the mix (`runtime.kernels.mix=reference`).",
    "kernel": "`runtime.kernels.{value}=reference` goes around it, slower.",
    "kernels": "`runtime.kernels.*=reference` for all of phi, cmp, select, sel, win and mix goes around it, slower.",
    "layers": "a matter of depth: memory, or numbers that grow from layer to layer.",
    "sequence length": "a matter of length: memory, or what only long sequences reach, such as a choice among many "
    "blocks.",
    "nothing": "No factor makes a difference: one process with one layer and nothing special fails. Read the log.",
}
FOR_KIND = {
    HANG: "Attach the files `stackdump_*` of every rank: they say where each one waits.",
    NON_FINITE: "The step that was not finite is kept in the folder below; it can be run again.",
    OUT_OF_MEMORY: "`nsa memory` says what a configuration needs and the largest batch that fits.",
    OTHER_NUMBERS: "It trains, and learns something else: do not start long runs with it.",
}


def write_page(diagnosis: Diagnosis) -> Path:
    """Writes both files; the page's path."""
    folder = diagnosis.patient.out
    told = summary(diagnosis)
    page = "\n".join(markdown(told)) + "\n"
    write_files(folder, {JSON_FILE: json.dumps(told, indent=2, allow_nan=False) + "\n", PAGE_FILE: page})
    return folder / PAGE_FILE


def summary(found: Diagnosis) -> dict[str, Any]:
    """Everything that was found, as plain values."""
    patient, failure = found.patient, found.failure
    told: dict[str, Any] = {
        "schema": SCHEMA,
        "nsa": __version__,
        "config": str(patient.config_file),
        "overrides": list(patient.overrides),
        "folder": str(patient.out),
        "time": time.time(),
        "seconds": found.seconds,
        "healthy": found.healthy,
        "verdict": verdict(found),
        "failure": None if failure is None else {"in": failure.name, "kind": failure.kind, "reason": failure.reason},
        "guilty": [{**asdict(g), "advice": _advice(g), "in_use": _in_use(g, patient.given)} for g in found.guilty],
        "smallest": None if found.smallest is None else _smallest(found, found.smallest),
        "environment": _environment(found),
        "machine": {"findings": found.machine.findings, "problem": found.machine.problem},
        "kernels": {"checks": found.kernels.findings, "problem": found.kernels.problem},
        "trials": [_trial(record) for record in found.records],
        "evidence": None if found.evidence is None else _evidence(found, found.evidence),
    }
    return {key: plain(value) for key, value in told.items()}


def verdict(found: Diagnosis) -> str:
    """The outcome in one sentence."""
    if found.failure is None:
        trials = sum(record.case is not None for record in found.records)
        return f"healthy: {trials} trials, {seconds(found.seconds)}"
    what = f"{found.failure.name}: {found.failure.kind}"
    guilty = " and ".join(g.text for g in found.guilty)
    return f"broken: {what}; guilty: {guilty or 'no single factor, the simplest case fails as well'}"


def _advice(guilty: Guilty) -> str:
    special = {"mixture": "mixture", "all": "kernels"}.get(guilty.value, guilty.factor)
    text = ADVICE.get(f"{guilty.factor} {guilty.value}") or ADVICE[special]
    return text.format(value=guilty.value, other="branch" if guilty.value == "block" else "block")


def _in_use(guilty: Guilty, given: Case) -> bool:
    """Whether the configuration as given has the factor at all."""
    if guilty.factor == "strategy":
        return given.strategy == guilty.value
    return guilty.factor != "checkpointing" or given.checkpointing != "none"


def _smallest(found: Diagnosis, case: Case) -> dict[str, Any]:
    patient = found.patient
    tree = patient.tree(case)
    if found.failure is not None and found.failure.kind == HANG:
        tree = timed(tree, patient.limit_s)
    nproc, stated = patient.processes(case), flat(patient.stated.to_dict())
    changed = {key: _spell(value) for key, value in flat(tree).items() if stated.get(key) != value}
    changed["train.out_dir"] = str(patient.out / "again")
    kept = [text for text in patient.overrides if text.partition("=")[0].strip() not in changed]
    overrides = (*kept, *(f"{key}={value}" for key, value in changed.items()))
    return {
        "factors": {**asdict(case), "nproc": nproc},
        "command": spelled(patient.config_file, nproc, overrides),
        "reproduced": None if found.evidence is None else bool(found.evidence.kind),
    }


def _spell(value: Any) -> str:
    """As an override is read: plain where YAML takes it for what it is."""
    plain = value if isinstance(value, str) else json.dumps(value)
    return plain if yaml.safe_load(plain) == value else json.dumps(value)


def _environment(found: Diagnosis) -> dict[str, Any]:
    """From the first trial that left word of it."""
    wanted = ("commit", "python", "platform", "packages", "gpu", "cuda", "driver")
    for record in found.records:
        if record.folder is not None:
            try:
                env = read_run(record.folder).env
            except ConfigError:
                continue
            if env:
                return {name: env.get(name) for name in wanted}
    return {}


def _trial(record: Record) -> dict[str, Any]:
    return {
        "name": record.name,
        "factors": {**asdict(record.case), "nproc": record.nproc} if record.case else {},
        "outcome": record.kind or "ok",
        "reason": record.reason,
        "seconds": record.seconds,
        "losses": list(record.losses),
        "grad_norms": list(record.norms),
        "folder": None if record.folder is None else str(record.folder),
    }


def _evidence(found: Diagnosis, last: Record) -> dict[str, Any]:
    """Of the traced run; where it did not fail this time, of the run that did."""
    failing = [r for r in reversed(found.records) if found.failure and r.kind == found.failure.kind and r.folder]
    shown = last if last.kind or not failing else failing[0]
    assert shown.folder is not None
    assert last.folder is not None
    return {
        "of": shown.name,
        "folder": str(shown.folder),
        "outcome": shown.kind or "ok",
        "reason": shown.reason,
        "stacks": stacks(shown.folder),
        "stood": _where_ranks_stood(shown.folder),
        "trace": _explained(last.folder),
        "log": [_printable(line) for line in shown.last_lines[-LOG_LINES:]],
        "numbers": _beside(shown, found.baseline),
    }


def _beside(shown: Record, baseline: Record | None) -> list[dict[str, Any]]:
    if baseline is None:
        return []
    rows = zip(shown.losses, baseline.losses, shown.norms, baseline.norms, strict=False)
    names = ("loss", "baseline_loss", "grad_norm", "baseline_grad_norm")
    return [{"step": step, **dict(zip(names, row, strict=True))} for step, row in enumerate(rows, start=1)]


def stacks(folder: Path) -> list[dict[str, Any]]:
    """By rank: what its main thread was at, the newest frame first, and other threads that were computing."""
    found = []
    for path in sorted(folder.glob(stack_dumps().pattern)):
        threads = _threads(path.read_text(encoding="utf-8", errors="replace"))
        mains = [frames for frames in threads if frames[-1].endswith(" <module>") or "runpy" in frames[-1]]
        if not mains:
            continue
        main = _from_the_command_on(mains[-1])
        others = [frames for frames in threads if frames not in mains and any(map(_COMPUTES.match, frames))]
        rank = int(path.stem.rpartition("_rank")[2])
        found.append({"rank": rank, "file": path.name, "frames": main, "computing": others[-2:]})
    return found


def _from_the_command_on(frames: list[str]) -> list[str]:
    """Without the calls that lead to the command, the same in every stack."""
    end = next((place for place, frame in enumerate(frames) if frame.startswith("nsa/cli/")), len(frames))
    return frames[:end] or frames


def _threads(text: str) -> list[list[str]]:
    """The stacks of a dump, each frame as `file:line function`."""
    threads: list[list[str]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            path = _LONG_PATH.sub("", frame["path"])
            threads[-1].append(f"{path}:{frame['line']} {frame['name']}")
    return [frames for frames in threads if frames]


def _where_ranks_stood(folder: Path) -> list[str]:
    """As the watchdog wrote it down."""
    for path in sorted(folder.glob(stack_dumps().pattern)):
        text = path.read_text(encoding="utf-8", errors="replace")
        stood = text.partition("where each rank stood:\n")[2].partition("\n\n")[0]
        if stood.strip():
            return [one_line(line, 200) for line in stood.splitlines()]
    return []


def _explained(folder: Path) -> list[str]:
    try:
        return list(explain(folder))
    except (ConfigError, ValueError):  # it ended before it traced anything
        return []


def _printable(line: str) -> str:
    """As it stands there, without what would steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in line[:300]).rstrip()


def markdown(told: Mapping[str, Any]) -> Iterator[str]:
    """The page, from the summary."""
    yield f"# nsa doctor: {'healthy' if told['healthy'] else 'broken'}"
    yield ""
    yield f"**{one_line(told['verdict'])}**"
    yield ""
    overrides = "".join(f" {override}" for override in told["overrides"])
    yield f"`{told['config']}{overrides}`, {clock(told['time'])}, {seconds(told['seconds'])} in all."
    if not told["healthy"]:
        yield from _finding(told)
    yield from _trials(told["trials"])
    yield from _probes(told)
    if told["evidence"]:
        yield from _shown(told["evidence"])
    yield from _surroundings(told["nsa"], told["environment"])


def _finding(told: Mapping[str, Any]) -> Iterator[str]:
    failure, smallest = told["failure"], told["smallest"]
    yield from ("", f"In '{failure['in']}': {one_line(failure['reason'], 600)}")
    if smallest:
        yield from ("", "The smallest configuration that shows it:", "", "```bash", smallest["command"], "```")
    if smallest and smallest["reproduced"] is False:
        yield from ("", "It passed when it was run once more: the failure is **not reproducible every time**.")
    yield from ("", "## What to do", "")
    for guilty in told["guilty"]:
        unused = "" if guilty["in_use"] else " The configuration as given does not use it."
        yield f"- **{guilty['text']}**: {guilty['advice']}{unused}"
    if not told["guilty"]:
        yield f"- {ADVICE['nothing']}"
    if failure["kind"] in FOR_KIND:
        yield f"- {FOR_KIND[failure['kind']]}"
    yield "- Attach this page to an issue. Start `nsa doctor` again when it is mended: it stops at the first fault."


def _trials(trials: list[dict[str, Any]]) -> Iterator[str]:
    yield from ("", "## Trials", "")
    yield from table_head("trial", "outcome", "time", "what was run", "remark")
    for trial in trials:
        yield row(
            trial["name"], trial["outcome"], seconds(trial["seconds"]), in_words(trial["factors"]), trial["reason"]
        )


def in_words(factors: Mapping[str, Any]) -> str:
    """A case for people; what is as simple as can be is left out."""
    if not factors:
        return ""
    words = [
        "single" if factors["strategy"] == "single" else f"{factors['strategy']} x {factors['nproc']}",
        "" if factors["checkpointing"] == "none" else f"checkpointing {factors['checkpointing']}",
        "compiled" if factors["compiled"] else "",
        f"branch {factors['branch']}" if factors["branch"] else "",
        f"{'+'.join(factors['slow'])} on the reference" if factors["slow"] else "",
        f"layers {factors['layers']}",
        f"tokens {factors['tokens']}",
        "its own data" if factors["data"] == AS_GIVEN else "",
        "its own batch" if factors["batch"] == AS_GIVEN else "",
    ]
    return ", ".join(filter(None, words))


def _probes(told: Mapping[str, Any]) -> Iterator[str]:
    """What the probes object to; nothing where they are content."""
    bad = [finding for finding in told["machine"]["findings"] if not finding["ok"]]
    if bad:
        yield from ("", "## Environment guard", "", *table_head("what", "found", "what to do"))
        yield from (row(finding["what"], finding["found"], finding["advice"]) for finding in bad)
    checks = told["kernels"]["checks"]
    wrong = dict.fromkeys(check["operator"] for check in checks if not check["ok"])
    if wrong:
        yield from ("", "## Kernels that are wrong", "", *table_head("operator", "backend", "part", "error", "allowed"))
    for check in checks:
        if check["operator"] in wrong:
            error = f"{_number(check['error'])}{'' if check['ok'] else ' **wrong**'}"
            yield row(check["operator"], check["backend"], check["part"], error, _number(check["limit"]))
    for operator in wrong:
        slopes = [c["ok"] for c in checks if c["operator"] == operator and "differences" in c["part"]]
        agrees = "agrees with finite differences: the fault is in the kernel"
        if slopes:
            yield from ("", f"{operator}: the reference {agrees if all(slopes) else 'contradicts finite differences'}.")


def _shown(evidence: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "## Evidence", "", f"Of '{evidence['of']}', in `{evidence['folder']}`: {evidence['outcome']}.")
    if evidence["reason"]:
        yield from ("", one_line(evidence["reason"], 600))
    if evidence["numbers"]:
        yield from ("", *table_head("step", "loss", "it should be", "gradient norm", "it should be"))
        yield from (row(*map(_number, step.values())) for step in evidence["numbers"])
    if evidence["stood"]:
        yield from block("Where each rank stood", evidence["stood"])
    for stack in evidence["stacks"]:
        frames = stack["frames"][:MOST_FRAMES]
        yield from block(f"Rank {stack['rank']}, main thread, newest call first (`{stack['file']}`)", frames)
        for computing in stack["computing"]:
            yield from block(f"Rank {stack['rank']}, a thread that was computing", computing[:MOST_FRAMES])
    if evidence["trace"]:
        yield from block("The trace (`nsa trace`)", evidence["trace"])
    if evidence["log"]:
        yield from block("The last lines of the log", evidence["log"])


def _surroundings(version: str, environment: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "## Environment", "", f"- nsa: {version}")
    for name, value in environment.items():
        if isinstance(value, dict):
            value = ", ".join(f"{package} {number}" for package, number in value.items() if number)
        if value:
            yield f"- {name}: {one_line(str(value), 300)}"


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
