"""The report of `nsa ready`: GO or NO-GO, the reasons, and the comparison with a baseline.

`readiness.json` contains plain values and a schema number; `readiness.md` and `readiness.html` are rendered from it.
"""

import json
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from nsa import __version__
from nsa.checks.readiness import FULL, Phase, ReadinessCheck
from nsa.checks.trials import Outcome, format_command, write_files
from nsa.errors import ConfigError, reworded
from nsa.formatting import clock, one_line, plain, seconds, short
from nsa.inspect.run_report import page

SCHEMA = 1
NOTICEABLE = 0.02  # smaller relative changes count as equal
JSON_FILE, MARKDOWN_FILE, HTML_FILE = "readiness.json", "readiness.md", "readiness.html"

_MORE_STYLE = """
.verdict{font-size:17px;margin:18px 0;padding:14px 18px;border-radius:10px;border:1px solid var(--line);
background:var(--goodbg);color:var(--good)}
.verdict.no{background:var(--badbg);color:var(--bad)}.verdict ul{margin:6px 0 0;padding-left:22px}
.verdict li{overflow-wrap:anywhere}.verdict pre{white-space:pre-wrap;overflow-wrap:anywhere}
td.pass{color:var(--good)}td.fail{color:var(--bad);font-weight:600}td.na{color:var(--soft)}
td{overflow-wrap:anywhere}
"""

Result = dict[str, Any]
_CLASSES = {"pass": "pass", "better": "pass", "fail": "fail", "worse": "fail", "not run": "fail", "n/a": "na"}


@dataclass(frozen=True)
class Section:
    """A section with a table or, without a `head`, with preformatted lines."""

    title: str
    head: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    lines: Sequence[str] = ()

    def markdown(self) -> Iterator[str]:
        yield from ("", f"## {cell(self.title)}", "")
        if self.head:
            yield from (_row(self.head), "|" + "---|" * len(self.head), *map(_row, self.rows))
        else:  # a line must not end the code block
            yield from ("```", *(line.replace("```", "~~~") for line in self.lines), "```")

    def html(self) -> str:
        name = self.title.lower().replace(" ", "-")
        if not self.head:
            body = f"<pre>{escape(chr(10).join(self.lines))}</pre>"
        else:
            heads = "".join(f"<th>{escape(name)}</th>" for name in self.head)
            body = f"<table><tr>{heads}</tr>{''.join(map(_html_row, self.rows))}</table>"
        title = escape(one_line(self.title))
        return f'<section id="{escape(name)}"><h2>{title}</h2><div class="card scroll">{body}</div></section>'


def cell(text: object) -> str:
    """Escapes untrusted text for a cell of a Markdown table."""
    return one_line(str(text)).replace("|", "\\|")


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(cell, cells)) + " |"


def _html_row(cells: Sequence[object]) -> str:
    made = (f'<td class="{_CLASSES.get(str(c), "")}">{escape(one_line(str(c)))}</td>' for c in cells)
    return f"<tr>{''.join(made)}</tr>"


def launch_commands(check: ReadinessCheck, config_file: Path, overrides: tuple[str, ...]) -> list[str]:
    """Returns the commands to run after a GO: the training, or after a quick check the full check."""
    if check.scale is not FULL:
        return [shlex.join(["nsa", "ready", str(config_file), *overrides, "--nproc", str(check.nproc)])]
    folder = check.config.train.out_dir or str(Path("runs") / config_file.stem)
    look = [shlex.join(["nsa", command, folder]) for command in ("watch", "report")]
    return [format_command(config_file, check.nproc, overrides), *look]


def build_result(check: ReadinessCheck, phases: list[Phase], config_file: Path, overrides: tuple[str, ...]) -> Result:
    reasons = [reason for phase in phases for reason in _reasons(phase)]
    env: dict[str, Any] = next((phase.facts["env"] for phase in phases if phase.facts.get("env")), {})
    return {
        "schema": SCHEMA,
        "nsa": __version__,
        "outcome": "NO-GO" if reasons else "GO",
        "scope": check.scale.label,
        "reasons": reasons,
        "time": time.time(),
        "seconds": sum(phase.seconds for phase in phases),
        "config_file": str(config_file),
        "overrides": list(overrides),
        "config": check.config.to_dict(),
        "nproc": check.nproc,
        "machine": {k: env.get(k) for k in ("gpu", "driver", "cuda", "python", "packages", "cpu_count", "commit")},
        "data": next((p.facts.get("data") for p in phases if p.key == "phase2"), None),
        "phases": [_phase(phase) for phase in phases],
        "criteria": [
            {"phase": phase.key, **asdict(c), "verdict": c.verdict} for phase in phases for c in phase.criteria
        ],
        "environment": phases[0].facts.get("machine", []),
        "kernels": phases[0].facts.get("kernels", []),
        "launch": launch_commands(check, config_file, overrides),
        "changes": None,
    }


def _reasons(phase: Phase) -> list[str]:
    if not phase.was_run:
        return [f"{phase.key} ({phase.title}) was not run"]
    return [
        f"{phase.key}: {c.name}: {c.measured}, wanted {c.target}" + (f" ({c.remark})" if c.remark else "")
        for c in phase.criteria
        if c.verdict == "fail"
    ]


def _phase(phase: Phase) -> dict[str, Any]:
    about = {name: getattr(phase, name) for name in ("key", "title", "was_run", "passed", "seconds")}
    artifacts = [asdict(artifact) for artifact in phase.artifacts]
    return {**about, "artifacts": artifacts, "runs": [_run(outcome) for outcome in phase.outcomes]}


def _run(outcome: Outcome) -> dict[str, Any]:
    trial = outcome.trial
    return {
        "name": trial.folder.name,
        "steps": trial.config.train.steps,
        **{name: getattr(outcome, name) for name in ("exit_code", "timed_out", "seconds", "reason")},
        "folder": str(trial.folder),
        "log": str(trial.log_file),
        "last_lines": [] if outcome.passed else list(outcome.last_lines),
    }


def read_baseline(path: Path) -> Result:
    """Reads the readiness.json of an earlier check."""
    what, remedy = f"--baseline: {path}: cannot be read", "give the readiness.json of an earlier check"
    with reworded(ConfigError, what, remedy, (OSError, ValueError)):
        baseline = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(baseline, dict) or baseline.get("schema") != SCHEMA:
        raise ConfigError(f"--baseline: {path}: is not a readiness.json of schema {SCHEMA}")
    return baseline


def compare(result: Result, baseline: Result) -> dict[str, Any]:
    """Compares every measured value with the baseline, and lists why the two may not be comparable."""
    then = {"scope": baseline.get("scope"), "processes": baseline.get("nproc"), "GPU": _gpus(baseline)}
    now = {"scope": result["scope"], "processes": result["nproc"], "GPU": _gpus(result)}
    unlike = [f"{name}: {then[name]} then, {now[name]} now" for name in now if then[name] != now[name]]
    values = {(c["phase"], c["name"]): c.get("value") for c in baseline.get("criteria", [])}
    rows = []
    for criterion in result["criteria"]:
        before, value = values.get((criterion["phase"], criterion["name"])), criterion["value"]
        if not criterion["better"] or not before or value is None:
            continue
        change = value / before - 1
        worse = change if criterion["better"] == "lower" else -change
        verdict = "worse" if worse > NOTICEABLE else "better" if worse < -NOTICEABLE else "same"
        about = {name: criterion[name] for name in ("phase", "name", "unit")}
        rows.append({**about, "then": before, "now": value, "change": change, "verdict": verdict})
    return {"unlike": unlike, "rows": rows}


def _gpus(result: Result) -> str:
    return ", ".join((result.get("machine") or {}).get("gpu") or []) or "none"


def write_pages(result: Result, folder: Path) -> None:
    text = json.dumps(plain(result), indent=1, allow_nan=False) + "\n"
    write_files(folder, {JSON_FILE: text, MARKDOWN_FILE: markdown(result), HTML_FILE: html(result)})


def headline(result: Result) -> str:
    if result["outcome"] != "GO":
        return "NO-GO"
    return "GO" if result["scope"] == "full" else "GO (quick check only: it does not clear a production run)"


def markdown(result: Result) -> str:
    lines = [f"# {headline(result)}", "", *(f"- {cell(fact)}" for fact in _facts(result)), ""]
    if result["reasons"]:
        lines += ["Why not:", "", *(f"- {cell(reason)}" for reason in result["reasons"])]
    else:
        lines += ["Launch:", "", "```sh", *result["launch"], "```"]
    return "\n".join([*lines, *(line for section in _sections(result) for line in section.markdown()), ""])


def html(result: Result) -> str:
    """Renders a self-contained page: the verdict with its commands or reasons, then the sections."""
    name, verdict = f"Readiness of {Path(result['config_file']).stem}", escape(headline(result))
    facts = "".join(f'<p class="facts">{escape(one_line(fact))}</p>' for fact in _facts(result))
    header = f'<header><div class="title"><h1>{escape(name)}</h1></div>{facts}</header>'
    if result["reasons"]:
        reasons = "".join(f"<li>{escape(one_line(reason))}</li>" for reason in result["reasons"])
        kind, inner = "verdict no", f"<ul>{reasons}</ul>"
    else:
        launch = "\n".join(result["launch"])
        kind, inner = "verdict", f"<pre>{escape(launch)}</pre>"
    answer = f'<div class="{kind}" id="verdict"><strong>{verdict}</strong>{inner}</div>'
    inside = answer + "".join(section.html() for section in _sections(result))
    return page(verdict, header, inside, f"Written by nsa {__version__}", _MORE_STYLE)


def _facts(result: Result) -> list[str]:
    machine = result["machine"]  # recorded by the runs; the probe has some of it if no run got that far
    probed = {finding["what"]: finding["found"] for finding in result["environment"]}
    cores = machine.get("cpu_count")
    where = ", ".join(machine.get("gpu") or []) or (f"CPU, {cores} cores" if cores else "")
    where = where or probed.get("GPU 0") or probed.get("device") or "an unknown machine"
    torch = (machine.get("packages") or {}).get("torch") or probed.get("torch") or "-"
    wanted = result["config"]["data"]
    data = (result.get("data") or {}).get("source") or wanted["source"]
    places = [*wanted["paths"], *(place for part in wanted["mixture"] for place in part["paths"])]
    return [
        f"configuration {result['config_file']} {' '.join(result['overrides'])}".strip(),
        f"{result['nproc']} {'process' if result['nproc'] == 1 else 'processes'} on {where}",
        f"data: {data}" + (f" from {', '.join(places)}" if places else ""),
        f"commit {machine.get('commit') or '-'}, torch {torch}",
        f"{clock(result['time'])}, {seconds(result['seconds'])}",
    ]


def _sections(result: Result) -> Iterator[Section]:
    head = ["phase", "criterion", "target", "measured", "verdict", "remark"]
    names = ["phase", "name", "target", "measured", "verdict", "remark"]
    yield Section("Criteria", head, [[c[name] for name in names] for c in result["criteria"]])
    if result["changes"]:
        yield _changes(result["changes"])
    phases = [[p["key"], p["title"], _verdict(p), seconds(p["seconds"])] for p in result["phases"]]
    yield Section("Phases", ["phase", "what", "verdict", "time"], phases)
    made = [[p["key"], a["name"], _passed(a), a["found"]] for p in result["phases"] for a in p["artifacts"]]
    if made:
        yield Section("Artifacts", ["phase", "artifact", "verdict", "found"], made)
    if findings := result["environment"]:
        rows = [[f["what"], f["found"], _passed(f), "" if f["ok"] else f["advice"]] for f in findings]
        yield Section("Environment", ["what", "found", "verdict", "advice"], rows)
    if kernels := result["kernels"]:
        rows = [
            [k["operator"], k["part"], k["backend"], f"{k['error']:.1e}", f"{k['limit']:.0e}", _passed(k)]
            for k in kernels
        ]
        yield Section("Kernels", ["operator", "part", "backend", "error", "limit", "verdict"], rows)
    for phase in result["phases"]:
        for run in phase["runs"]:
            if run["last_lines"] and not (phase["key"] == "phase3" and phase["passed"]):  # it kills a run
                lines = [one_line(line, 300) for line in run["last_lines"]]
                yield Section(f"Last lines of {run['name']}: {run['reason']} (all output: {run['log']})", lines=lines)


def _passed(checked: dict[str, Any]) -> str:
    return "pass" if checked["ok"] else "fail"


def _verdict(phase: dict[str, Any]) -> str:
    return "not run" if not phase["was_run"] else "pass" if phase["passed"] else "fail"


def _changes(changes: dict[str, Any]) -> Section:
    rows = []
    for row in changes["rows"]:
        then, now = (f"{short(row[at])} {row['unit']}" for at in ("then", "now"))
        rows.append([row["phase"], row["name"], then, now, f"{row['change']:+.1%}", row["verdict"]])
    rows += [["", text, "", "", "", "not comparable"] for text in changes["unlike"]]
    return Section("Against the baseline", ["phase", "what", "then", "now", "change", "verdict"], rows)
