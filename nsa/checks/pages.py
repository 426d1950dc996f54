"""`readiness.md` and `readiness.html`: the answer first, then every target beside what was measured."""

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from nsa.checks.result import Result
from nsa.checks.writing import block, cell, row, table_head, write_files
from nsa.inspect.report_style import STYLE
from nsa.record.numbers import clock, one_line, plain, seconds, short

JSON_FILE, MARKDOWN_FILE, HTML_FILE = "readiness.json", "readiness.md", "readiness.html"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_MORE_STYLE = """
.verdict{font-size:17px;margin:18px 0;padding:14px 18px;border-radius:10px;border:1px solid var(--line);
background:var(--goodbg);color:var(--good)}
.verdict.no{background:var(--badbg);color:var(--bad)}.verdict ul{margin:6px 0 0;padding-left:22px}
.verdict li{overflow-wrap:anywhere}
td.pass{color:var(--good)}td.fail{color:var(--bad);font-weight:600}td.na{color:var(--soft)}
td{overflow-wrap:anywhere}
"""
Table = tuple[list[str], list[list[str]]]


def write_pages(result: Result, folder: Path) -> None:
    contents = {
        JSON_FILE: json.dumps(plain(result), indent=1, allow_nan=False) + "\n",
        MARKDOWN_FILE: markdown(result),
        HTML_FILE: html(result),
    }
    write_files(folder, contents)


def headline(result: Result) -> str:
    if result["outcome"] != "GO":
        return "NO-GO"
    return "GO" if result["scope"] == "full" else "GO (quick check only: it does not clear a production run)"


def _facts(result: Result) -> list[str]:
    machine = result["machine"]  # as the runs recorded it; where none came so far, the probe has seen some of it
    seen = {finding["what"]: finding["found"] for finding in result["environment"]}
    cores = machine.get("cpu_count")
    where = ", ".join(machine.get("gpu") or []) or (f"CPU, {cores} cores" if cores else "")
    where = where or seen.get("GPU 0") or seen.get("device") or "an unknown machine"
    torch = (machine.get("packages") or {}).get("torch") or seen.get("torch") or "-"
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


def _sections(result: Result) -> Iterator[tuple[str, Table]]:
    yield (
        "Criteria",
        (
            ["phase", "criterion", "target", "measured", "verdict", "remark"],
            [
                [c["phase"], c["name"], c["target"], c["measured"], c["verdict"], c["remark"]]
                for c in result["criteria"]
            ],
        ),
    )
    if result["changes"]:
        yield "Against the baseline", _changes(result["changes"])
    yield (
        "Phases",
        (
            ["phase", "what", "verdict", "time"],
            [[p["key"], p["title"], _verdict(p), seconds(p["seconds"])] for p in result["phases"]],
        ),
    )
    artifacts = [
        [p["key"], a["name"], "pass" if a["ok"] else "fail", a["found"]]
        for p in result["phases"]
        for a in p["artifacts"]
    ]
    if artifacts:
        yield "Artifacts", (["phase", "artifact", "verdict", "found"], artifacts)
    if result["environment"]:
        rows = [
            [f["what"], f["found"], "pass" if f["ok"] else "fail", "" if f["ok"] else f["advice"]]
            for f in result["environment"]
        ]
        yield "Environment", (["what", "found", "verdict", "advice"], rows)
    if result["kernels"]:
        rows = [
            [
                k["operator"],
                k["part"],
                k["backend"],
                f"{k['error']:.1e}",
                f"{k['limit']:.0e}",
                "pass" if k["ok"] else "fail",
            ]
            for k in result["kernels"]
        ]
        yield "Kernels", (["operator", "part", "backend", "error", "limit", "verdict"], rows)


def _verdict(phase: dict[str, Any]) -> str:
    return "not run" if not phase["was_run"] else "pass" if phase["passed"] else "fail"


def _changes(changes: dict[str, Any]) -> Table:
    rows = [
        [
            row["phase"],
            row["name"],
            f"{short(row['then'])} {row['unit']}",
            f"{short(row['now'])} {row['unit']}",
            f"{row['change']:+.1%}",
            row["verdict"],
        ]
        for row in changes["rows"]
    ]
    rows += [["", one_line(text), "", "", "", "not comparable"] for text in changes["unlike"]]
    return ["phase", "what", "then", "now", "change", "verdict"], rows


def _failures(result: Result) -> Iterator[tuple[str, list[str]]]:
    """The last words of runs that failed and should not have."""
    for phase in result["phases"]:
        for run in phase["runs"]:
            if run["last_lines"] and not (phase["key"] == "phase3" and phase["passed"]):
                yield f"{run['name']}: {run['reason']} (whole output: {run['log']})", run["last_lines"]


def markdown(result: Result) -> str:
    lines = [f"# {headline(result)}", ""]
    lines += [f"- {cell(fact)}" for fact in _facts(result)] + [""]
    if result["reasons"]:
        lines += ["Why not:", ""] + [f"- {cell(reason)}" for reason in result["reasons"]] + [""]
    else:
        lines += ["Launch:", "", "```sh", *result["launch"], "```", ""]
    for title, (head, rows) in _sections(result):
        lines += [f"## {title}", "", *table_head(*head), *(row(*cells) for cells in rows), ""]
    for title, words in _failures(result):
        lines += [f"## {cell(title)}", *block("Its last lines", [one_line(word, 300) for word in words]), ""]
    return "\n".join(lines)


def html(result: Result) -> str:
    go = result["outcome"] == "GO"
    inner = "".join(f"<li>{escape(one_line(reason))}</li>" for reason in result["reasons"])
    launch = f"<pre>{escape(chr(10).join(result['launch']))}</pre>" if go else f"<ul>{inner}</ul>"
    tables = "".join(_table(title, table) for title, table in _sections(result))
    words = "".join(
        f'<section><h2>Last lines of {escape(one_line(title))}</h2><div class="card"><pre>'
        f"{escape(chr(10).join(one_line(line, 300) for line in lines))}</pre></div></section>"
        for title, lines in _failures(result)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<title>{escape(headline(result))}</title><link rel="icon" href="data:,">'
        f"<style>{STYLE}{_MORE_STYLE}</style></head><body>"
        f'<header><div class="title"><h1>Readiness of {escape(Path(result["config_file"]).stem)}</h1></div>'
        + "".join(f'<p class="facts">{escape(one_line(fact))}</p>' for fact in _facts(result))
        + f'</header><main><div class="verdict{"" if go else " no"}" id="verdict"><strong>{escape(headline(result))}'
        f"</strong>{launch}</div>{tables}{words}</main></body></html>\n"
    )


def _table(title: str, table: Table) -> str:
    head, rows = table
    mark = {"pass": "pass", "better": "pass", "fail": "fail", "worse": "fail", "not run": "fail", "n/a": "na"}
    cells = "".join(
        "<tr>"
        + "".join(f'<td class="{mark.get(cell, "")}">{escape(one_line(str(cell)))}</td>' for cell in row)
        + "</tr>"
        for row in rows
    )
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    return (
        f'<section id="{title.lower().replace(" ", "-")}"><h2>{escape(title)}</h2>'
        f'<div class="card scroll"><table><tr>{heads}</tr>{cells}</table></div></section>'
    )
