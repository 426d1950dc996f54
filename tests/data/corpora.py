"""Writes tokenised corpora byte by byte, from the descriptions of the formats."""

import struct
from pathlib import Path

CODES = {"B": 1, "b": 2, "h": 3, "i": 4, "q": 5, "H": 8}  # of Megatron's dtypes, by the letters of struct


def longs(numbers):
    return b"".join(struct.pack("<q", number) for number in numbers)


def write_tokens(path: Path, sequences, letter):
    path.write_bytes(b"".join(struct.pack("<" + letter, token) for tokens in sequences for token in tokens))


def write_megatron(prefix: Path, documents, letter="H", *, legacy=False):
    """A .bin and .idx pair. A document is a list of sequences, and a sequence a list of tokens."""
    sequences = [tokens for document in documents for tokens in document]
    width = struct.calcsize("<" + letter)
    write_tokens(prefix.with_name(prefix.name + ".bin"), sequences, letter)
    places, bounds = [0], [0]
    for tokens in sequences:
        places.append(places[-1] + len(tokens))
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    index = bytearray()
    if legacy:
        index += b"TNTIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<QQ", CODES[letter], width)
        index += struct.pack("<QQ", len(sequences), len(sequences)) + struct.pack("<Q", len(bounds))
        index += longs(range(len(sequences) + 1)) + longs(places) + longs(map(len, sequences))
    else:
        index += b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[letter])
        index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(bounds))
        index += b"".join(struct.pack("<i", len(tokens)) for tokens in sequences)
        index += longs(place * width for place in places[:-1])
    index += longs(bounds)
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    return prefix


def write_datatrove(path: Path, documents, letter="H", metadata=None):
    """A .ds file with its .index, and .metadata if its first line is given."""
    sequences = [[token for tokens in document for token in tokens] for document in documents]
    write_tokens(path, sequences, letter)
    end, ends = 0, []
    for tokens in sequences:
        end += len(tokens)
        ends.append(end)
    path.with_name(path.name + ".index").write_bytes(b"".join(struct.pack("<Q", end) for end in ends))
    if metadata is not None:
        path.with_name(path.name + ".metadata").write_text(f"{metadata}\n{end}\n{end} T")
    return path


def write_texts(kind: str, folder: Path, texts, *, end=(0xFF,)):
    """A corpus of texts in `bytes` tokens; returns its data section. Megatron documents have a sequence per line."""
    folder.mkdir(exist_ok=True)
    documents = [[*map(list, text.encode().splitlines(keepends=True)), list(end)] for text in texts]
    if kind == "megatron":
        write_megatron(folder / "corpus_text_document", documents, "B")
    else:
        write_datatrove(folder / "00000_00000_shuffled.ds", documents, "H", "bytes|2")
    return {"source": kind, "paths": [str(folder)]}
