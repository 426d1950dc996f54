"""Text piece by piece: whole characters, stop texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from nsa.data.tokenizers import ByteTokenizer
from nsa.generate.text_stream import TextStream

DECODE = ByteTokenizer().decode


def pieces(data: bytes, stop: list[str] | None = None) -> list[str]:
    stream, found = TextStream(DECODE, stop or []), []
    for byte in data:
        found.append(stream.push(byte))
        if stream.stopped:
            break
    return [*found, stream.finish()]


def test_a_character_comes_when_its_last_byte_does():
    assert pieces("aé€😀".encode()) == ["a", "", "é", "", "", "€", "", "", "", "😀", ""]


@given(
    st.lists(st.sampled_from([b"a", b"\x80", b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac", b"\xf0", b"\x9f", b"\xfe"]))
)
def test_together_they_are_the_text_whatever_the_bytes(given_bytes):
    data = b"".join(given_bytes)
    assert "".join(pieces(data)) == DECODE(list(data))


def test_invalid_bytes_are_returned_with_the_next_character():
    assert pieces(b"\x80\x80a") == ["", "", "\ufffd\ufffda", ""]


def test_a_decoder_that_replaces_every_byte_keeps_characters_and_special_tokens_keep_spaces():
    """Like the decoders of Llama's and Mistral's vocabularies: a byte at a time, a space in front of words."""
    emoji = dict(enumerate("😀".encode()))

    def decode(ids):
        parts, data = [], b""
        for i in [*ids, None]:
            if i in emoji:
                data += bytes([emoji[i]])
                continue
            if data:
                whole = data.decode("utf-8", errors="ignore")
                parts.append(whole or "\ufffd" * len(data))
                data = b""
            parts.append({8: " hello", 9: " world", 10: ""}.get(i, ""))
        return "".join(parts).removeprefix(" ")

    stream = TextStream(decode)
    assert [stream.push(i) for i in (0, 1, 2, 3, 8, 10, 9)] == ["", "", "", "😀", " hello", "", " world"]
    assert TextStream(decode, before=[8]).push(9) == " world"


def test_adjacent_characters_of_byte_tokens_are_whole():
    """Such as two emojis in a row: the decoder of Llama's and Mistral's vocabularies knows no character in a row of
    bytes of which one is missing."""
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])

    def decode(ids):
        return decoder.decode([f"<0x{i:02X}>" if i < 256 else "a" for i in ids])

    text = "😀😀本語é"
    stream = TextStream(decode)
    assert [piece for piece in map(stream.push, [*text.encode(), 256]) if piece] == [*text, "a"]
    for prompt in ("本語" * 5, "😀" * 5, "é本語"):
        stream = TextStream(decode, before=list(prompt.encode()))
        assert [piece for piece in map(stream.push, text.encode()) if piece] == [*text]
    stream = TextStream(decode)
    found = [stream.push(i) for i in (*"本".encode(), 0xFE, 256, *"語".encode())]
    assert "".join(found) == "本\ufffda語"


@pytest.mark.parametrize(
    ("stop", "wanted"),
    [
        (["\n\n"], "ab\nc"),
        (["zz"], "ab\nc\n\nd"),
        (["c\n", "\n\n"], "ab\n"),
        (["d"], "ab\nc\n\n"),
        (["b\nc\n\nd!"], "ab\nc\n\nd"),
        (["a"], ""),
    ],
)
def test_text_ends_before_the_first_stop_text(stop, wanted):
    assert "".join(pieces(b"ab\nc\n\nd", stop)) == wanted


def test_a_possible_start_of_a_stop_text_is_held_back():
    assert pieces(b"ab\nc", ["\n\n"]) == ["a", "b", "", "\nc", ""]


def test_a_stop_text_found_at_the_end_keeps_the_text_before_it():
    assert pieces(b"ab\x80", ["\ufffd"]) == ["a", "b", "", ""]
    stream = TextStream(DECODE, ["x\ufffd"])
    assert [stream.push(byte) for byte in b"ax\x80"] == ["a", "", ""]
    assert (stream.finish(), stream.stopped) == ("", True)


def test_a_tokenizer_that_puts_spaces_between_tokens_keeps_them():
    words = ["the", "cat", "sat"]
    stream = TextStream(lambda ids: " ".join(words[i] for i in ids))
    assert "".join([*(stream.push(i) for i in range(3)), stream.finish()]) == "the cat sat"
