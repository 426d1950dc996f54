"""Token ids to text, piece by piece: whole characters, up to the first of some stop texts."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what a tokenizer gives for bytes that are no whole character, one for all or one for each
MOST_INCOMPLETE = 3  # bytes of a character without its last
CONTEXT = 16  # tokens before those of a stream that their text may depend on


class TextStream:
    """The text of a growing sequence of tokens.

    Together the pieces are the text of all tokens. A character whose bytes come in several tokens is held back until
    it is whole, and what may be the start of a stop text until it is clear that it is none.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), before: Sequence[int] = ()):
        """`before` are the tokens that the sequence goes on from."""
        self.stopped = False  # whether a stop text has come; it is not part of the text
        self._decode, self._stop = decode, stop
        self._before = list(before[-CONTEXT:])  # their text is complete; some tokenizers look at what comes before
        self._tokens: list[int] = []  # those after them
        self._given = 0  # characters that `_tokens` gave already
        self._held = ""

    def push(self, token: int) -> str:
        """The text that one more token completes."""
        self._tokens.append(token)
        text = self._text()
        # Bytes that are no character stay so, but the last may be the start of one.
        open_end = len(text) - len(text.rstrip(REPLACEMENT))
        whole = text[: len(text) - min(open_end, MOST_INCOMPLETE)]
        piece, self._given = whole[self._given :], max(self._given, len(whole))
        if text and whole == text:  # a special token has no text, and what came before it still counts
            self._before, self._tokens, self._given = self._tokens, [], 0
        return self._cut(piece)

    def finish(self) -> str:
        """What was held back."""
        if self.stopped:
            return ""
        piece = self._cut(self._text()[self._given :])
        return piece + self._held  # which is empty after a stop text

    def _text(self) -> str:
        return self._decode(self._before + self._tokens)[len(self._decode(self._before)) :]

    def _cut(self, piece: str) -> str:
        """`piece` with what was held before it, up to a stop text or the possible start of one."""
        text = self._held + piece
        found = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        kept = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the start of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
