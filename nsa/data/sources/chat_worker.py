"""A program that renders conversations with a chat template. `nsa.data.sources.chat` runs it as a process.

A template is code from outside. Jinja's sandbox keeps it away from Python's attributes, and the limits of the process
bound its time and memory: SIGPROF ends the process even inside a function that is written in C. The first line of stdin
has the template and its variables. Every other line is a conversation and is answered by one line: the rendered text or
an error.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def generation_tag(start: str, end: str) -> type[Extension]:
    """Returns the tags `{% generation %}` and `{% endgeneration %}`, which put marks around the assistant's text."""

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  (as in the base class)

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Callable[[], str]) -> str:
            return start + caller() + end

    return Generation


def raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter `tojson` of transformers, which does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(
    template: str, variables: dict[str, str], marks: list[str], max_characters: int
) -> Callable[..., str]:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation_tag(*marks), "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    compiled = environment.from_string(template)

    def render(messages: list[Any], *, prompt: bool, **others: Any) -> str:
        found = compiled.render(messages=messages, add_generation_prompt=prompt, **variables, **others)
        if len(found) > max_characters:
            raise TemplateError(f"the text of one conversation has {len(found):,} characters, over {max_characters:,}")
        return found

    return render


def render_marked(render: Callable[..., str], marks: list[str], messages: list[Any], **others: Any) -> str:
    """Renders a conversation with marks around the text of the assistant.

    If the template does not mark it, it is the difference between two beginnings of the conversation: up to the prompt
    for an answer, and up to the end of the answer.
    """
    start, end = marks
    whole = render(messages, prompt=False, **others)
    if start in whole:
        return whole
    parts, done = [], 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = render(messages[:number], prompt=True, **others)
        answered = render(messages[: number + 1], prompt=False, **others)
        if not (done <= len(asked) and answered.startswith(asked) and whole.startswith(answered)):
            raise TemplateError(
                f"it renders message {number + 1} in another way when later messages follow, or after the prompt for "
                "an answer, so the tokens of the assistant are unknown; put {% generation %} and {% endgeneration %} "
                "around the assistant's text in the template"
            )
        parts += [whole[done : len(asked)], start, whole[len(asked) : len(answered)], end]
        done = len(answered)
    return "".join([*parts, whole[done:]])


def answer(work: Callable[[], Any], cpu_s: float) -> Any:
    """Calls `work` with a limit on CPU time and prints its result or its error. Returns the result."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        found = work()
        reply = {"text": found if isinstance(found, str) else ""}
    except Exception as error:  # a template can raise any type
        reason = "it needs too much memory" if isinstance(error, MemoryError) else str(error) or type(error).__name__
        unsafe = "the sandbox refuses it: " if isinstance(error, SecurityError) else ""
        found, reply = None, {"error": f"{unsafe}{reason}"[:2000]}
    print(json.dumps(reply), flush=True)
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    return found


def main() -> None:
    # Launchers and Ctrl-C signal all processes. The parent decides; this process ends when its stdin is closed.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    first = json.loads(sys.stdin.readline())
    cpu_s, marks = first.pop("cpu_s"), first["marks"]
    for kind, most in ((resource.RLIMIT_AS, first.pop("memory_bytes")), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(kind)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))
    render = answer(partial(compile_template, **first), cpu_s)
    for line in sys.stdin:
        asked = json.loads(line)
        if not asked.pop("prompt"):
            answer(partial(render_marked, render, marks, **asked), cpu_s)
        else:
            answer(partial(render, prompt=True, **asked), cpu_s)


if __name__ == "__main__":
    main()
