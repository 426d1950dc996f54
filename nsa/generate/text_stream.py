"""Incremental detokenization: whole characters, up to the first stop text."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # a tokenizer's text for bytes that are not a whole character, one for all or one each
MOST_INCOMPLETE = 3  # bytes of an incomplete UTF-8 character
CONTEXT = 16  # preceding tokens that the text of a token may depend on


class TextStream:
    """The text of a growing sequence of tokens.

    The pieces together are the text of all tokens. A character whose bytes come in several tokens is held back until it
    is complete, and text that may start a stop text until it cannot.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), before: Sequence[int] = ()):
        """`before` are the tokens that precede the sequence."""
        self.stopped = False  # whether a stop text was found; it is not part of the text
        self._decode, self._stop = decode, stop
        self._before = list(before[-CONTEXT:])  # their text is complete; some tokenizers use the preceding tokens
        for _ in range(MOST_INCOMPLETE):
            if decode(self._before).startswith(REPLACEMENT):  # the end of a character
                self._before.pop(0)
        self._tokens: list[int] = []  # tokens after `_before`
        self._given = 0  # characters of `_tokens` that were returned already
        self._pending = ""

    def push(self, token: int) -> str:
        """The text that one more token completes."""
        self._tokens.append(token)
        text = self._text()
        # Invalid bytes stay invalid, but the last ones may be the start of a character.
        open_end = len(text) - len(text.rstrip(REPLACEMENT))
        whole = text[: len(text) - min(open_end, MOST_INCOMPLETE)]
        piece, self._given = whole[self._given :], max(self._given, len(whole))
        if text and whole == text:  # a special token has no text; keep the tokens before it as context
            self._before, self._tokens, self._given = self._tokens, [], 0
        return self._cut(piece)

    def finish(self) -> str:
        """The text that was held back."""
        if self.stopped:
            return ""
        piece = self._cut(self._text()[self._given :])
        return piece + self._pending  # empty after a stop text

    def _text(self) -> str:
        """The text of `_tokens` after the tokens before them."""
        before, both = self._decode(self._before), self._decode(self._before + self._tokens)
        # Decoders with byte fallback replace every byte of adjacent characters until the last one is complete.
        return both[len(before) :] if both.startswith(before) else self._decode(self._tokens)

    def _cut(self, piece: str) -> str:
        """The pending text and `piece`, up to a stop text or the possible start of one."""
        text = self._pending + piece
        found = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped, self._pending = True, ""
            return text[: min(found)]
        kept = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._pending = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
