"""Conversations in .jsonl files, and the process that renders them with a chat template.

A document is a rendered conversation with marks: START and END around the text of the assistant, OPEN and CLOSE around
text of a message that equals a special token, which must stay text.
"""

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nsa.data.sources.base import MAX_DOCUMENT_BYTES, Skipped, Unit
from nsa.data.sources.text import TextSource, kind_and_codec
from nsa.errors import DataError

START, END, OPEN, CLOSE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"  # noncharacters, which text does not contain
MARKS = START + END + OPEN + CLOSE
PROGRAM = Path(__file__).with_name("chat_worker.py")
CPU_S = 10.0  # limit for one conversation
MEMORY_BYTES = 2 << 30
ROLES = ("system", "developer", "user", "assistant", "tool")
NO_ANSWER = "no message of the assistant"
EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


class Renderer:
    """Renders conversations with a template, in a process that has limits on CPU time and memory. Thread-safe.

    template    text of a Jinja template; `variables` are texts that it can use, such as `bos_token`
    special     texts of the special tokens, which the content of a message must not contain as such
    """

    def __init__(
        self, template: str, variables: Mapping[str, str], special: Sequence[str] = (), *, cpu_s: float = CPU_S
    ):
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._cpu_s = cpu_s
        self._lock = threading.Lock()
        self._is_closed = False
        limits = {"cpu_s": cpu_s, "memory_bytes": MEMORY_BYTES, "max_characters": MAX_DOCUMENT_BYTES}
        self._setup = json.dumps({"template": template, "variables": dict(variables), "marks": [START, END], **limits})
        try:
            self._start()
        except ValueError as error:
            self.close()
            raise DataError(f"data.chat_template: {error}") from None

    def render(self, conversation: Mapping[str, Any], *, prompt: bool = False) -> str:
        """Returns the text of a conversation with marks. With `prompt` it ends where the assistant continues. Raises
        ValueError with the reason."""
        content = {key: conversation[key] for key in ("messages", "tools") if conversation.get(key) is not None}
        try:
            question = json.dumps({**self._without_special(content), "prompt": prompt})
        except RecursionError:
            raise ValueError("its lists and objects are nested too deeply; remove the line") from None
        with self._lock:
            if self._process.poll() is not None and not self._is_closed:  # another conversation exceeded a limit
                self._process.communicate()  # closes its pipes
                self._start()
            return self._ask(question)

    def _start(self) -> None:
        # -P: modules beside the program must not hide those of the standard library
        command = [sys.executable, "-P", str(PROGRAM)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)  # noqa: S603
        self._ask(self._setup)

    def _ask(self, question: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        reply = ""
        with suppress(OSError, ValueError):  # of a process that has ended
            self._process.stdin.write(question + "\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        if not reply:
            ended = self._process.wait()
            limit = f"more than {self._cpu_s:g} s of CPU time"
            if ended != -signal.SIGPROF:
                limit = f"probably more than {MEMORY_BYTES >> 30} GiB of memory (its process ended with code {ended})"
            raise ValueError(f"the chat template needs {limit} for a conversation; use another template")
        answer = json.loads(reply)
        if "error" in answer:
            raise ValueError(f"the chat template fails: {answer['error']}")
        return str(answer["text"])

    def _without_special(self, value: Any) -> Any:
        """Replaces marks in all texts, and puts marks around special tokens."""
        if isinstance(value, str):
            value = value.translate(dict.fromkeys(map(ord, MARKS), "\ufffd"))
            return self._special.sub(lambda found: OPEN + found[0] + CLOSE, value)
        if isinstance(value, list):
            return [self._without_special(item) for item in value]
        if isinstance(value, dict):
            return {self._without_special(key): self._without_special(item) for key, item in value.items()}
        return value

    def close(self) -> None:
        self._is_closed = True
        self._process.kill()  # ends the conversation of another thread, which has the lock
        with self._lock:
            self._process.communicate()


class ChatSource(TextSource):
    """One conversation per line of a .jsonl file: a list `messages`, and optionally a list `tools`."""

    name = "chat"

    def __init__(self, paths: Sequence[str], renderer: Renderer, **options: Any):
        super().__init__(paths, **options)
        self.renderer = renderer

    def _units_of(self, path: Path) -> list[Unit]:
        if kind_and_codec(path)[0] != ".jsonl":
            raise DataError(f"data.paths: {path}: conversations are read from .jsonl files; convert it or name others")
        return super()._units_of(path)

    def documents(self, unit: Unit, skipped: Skipped) -> Iterator[str]:
        for text in super().documents(unit, skipped):
            if START in text:
                yield text
            else:
                skipped[NO_ANSWER] += 1

    def _text_of(self, record: Any) -> str:
        check_conversation(record)
        return self.renderer.render(record)


def check_conversation(record: Any) -> None:
    """Raises ValueError unless the record is a conversation."""
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"has no list 'messages'; write a conversation as {EXAMPLE}")
    if not isinstance(record.get("tools", []), list | None):
        raise ValueError("'tools' must be a list")
    for number, message in enumerate(messages, start=1):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise ValueError(f"message {number} has the role {role!r:.60}; use {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"message {number} must have a text as 'content', got {type(content).__name__}")
