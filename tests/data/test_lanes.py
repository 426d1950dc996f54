"""Streamed units: every document once an epoch, the same tokens for any number of threads, ranks and restarts."""

import os
import random
import threading

import numpy as np
import pytest

from nsa.data import lanes
from nsa.data.corpus import in_validation, key_of
from nsa.data.lanes import LengthIndex, StreamedSequences, UnitReader, choose_lanes, collect_validation
from nsa.data.sequences import random_order
from nsa.data.sources.base import Unit
from nsa.data.tokenizers import ByteTokenizer
from nsa.errors import DataError, DataUnavailableError
from tests.waiting import wait_until

TOKENIZER = ByteTokenizer()
SEQ_LEN = 24


class Pages:
    """A source of `units` units with a few documents each; counts who reads what."""

    name = "pages"

    def __init__(self, units=13, documents=7, tag=""):
        self.texts = [
            [f"unit {u} document {d} {tag}" + "xyz" * (d % 5) for d in range(documents)] for u in range(units)
        ]
        self.reads = []
        self.threads = set()

    def units(self):
        return [Unit("pages", part=u, stop=len(t), size=sum(map(len, t))) for u, t in enumerate(self.texts)]

    def documents(self, unit, skipped):
        self.reads.append(unit.part)
        self.threads.add(threading.current_thread().name)
        yield from self.texts[unit.part]

    def fingerprint(self):
        return str(hash(str(self.texts)))


def sequences_of(source, *, threads=0, lanes=4, folder=None, rank=0, fraction=0.0, seed=1):
    index = LengthIndex(folder, rank, "print")
    return StreamedSequences(UnitReader(source, TOKENIZER, fraction, threads, index), SEQ_LEN, seed, lanes)


def tokens_of(sequences, numbers):
    numbers = list(numbers)
    sequences.prefetch(numbers)
    return [(row.inputs.tobytes(), row.targets.tobytes(), row.starts.tolist()) for row in map(sequences.row, numbers)]


def test_an_epoch_of_a_lane_holds_its_documents_once_and_whole():
    source = Pages()
    sequences = sequences_of(source, lanes=4, fraction=0.2)
    expected = [
        t for texts in source.texts for t in texts if not in_validation(np.array([key_of(t)], np.uint64), 0.2)[0]
    ]
    read = []
    for lane in sequences._lanes:
        length = sum(
            len(t.encode()) + 1 for u in range(lane.per_epoch) for t in source.texts[lane.unit(u)[1]] if t in expected
        )
        tokens, borders = lane.read(0, length)
        for start, stop in zip(borders, [*borders[1:], length], strict=True):
            read.append(TOKENIZER.decode(tokens[start:stop].tolist()))
    assert sorted(read) == sorted(expected)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_number_of_threads_changes_no_token(threads):
    plain = tokens_of(sequences_of(Pages(units=60)), range(200))
    source = Pages(units=60)
    sequences = sequences_of(source, threads=threads)
    assert [row for first in range(0, 200, 4) for row in tokens_of(sequences, range(first, first + 4))] == plain
    assert all(name.startswith("data-") for name in source.threads), "units are read ahead by the threads"


def test_any_world_size_reads_the_same_sequences_and_no_unit_twice():
    plain = tokens_of(sequences_of(Pages(units=40), lanes=8), range(96))
    for size in (1, 2, 4):
        found, reads = {}, []
        for rank in range(size):
            source = Pages(units=40)
            numbers = range(rank, 96, size)
            found |= dict(zip(numbers, tokens_of(sequences_of(source, lanes=8), numbers), strict=True))
            reads.append(set(source.reads))
        assert [found[n] for n in range(96)] == plain
        for a in range(size):
            for b in range(a):
                assert not reads[a] & reads[b], "ranks share no unit"


def test_units_that_a_rank_passes_over_are_not_kept():
    """In the second epoch the lengths are known: a rank of many jumps over units that were read ahead."""
    sequences = sequences_of(Pages(units=60), threads=2, lanes=4)
    tokens_of(sequences, range(400))
    for first in range(400, 4000, 40):
        tokens_of(sequences, range(first, first + 4))
        assert len(sequences.reader._pending) <= 3 * 4


def test_a_restart_finds_its_position_without_reading_units_again(tmp_path):
    whole = tokens_of(sequences_of(Pages(units=40)), range(400))
    tokens_of(sequences_of(Pages(units=40), folder=tmp_path), range(300))
    source = Pages(units=40)
    again = sequences_of(source, folder=tmp_path)
    assert tokens_of(again, range(300, 308)) == whole[300:308]
    assert len(source.reads) <= 12, f"{len(source.reads)} units were read to resume with two sequences of four lanes"


def test_without_its_index_a_restart_finds_the_same_place(tmp_path):
    whole = tokens_of(sequences_of(Pages()), range(300))
    assert tokens_of(sequences_of(Pages()), range(290, 300)) == whole[290:]


@pytest.mark.parametrize("damage", ["cut", "flip", "other", "empty", "binary"])
def test_a_damaged_index_costs_time_and_nothing_else(tmp_path, damage):
    whole = tokens_of(sequences_of(Pages()), range(300))
    tokens_of(sequences_of(Pages(), folder=tmp_path), range(200))
    (path,) = tmp_path.glob("data_index_rank*.txt")
    content = path.read_bytes()
    lines = content.split(b"\n")
    lines[3] = b"9 1 " + lines[3].split()[2]
    path.write_bytes(
        {
            "cut": content[: len(content) // 2],
            "flip": b"\n".join(lines),
            "other": content.replace(b"print", b"other"),
            "empty": b"",
            "binary": b"\xff\xfe" + content,
        }[damage]
    )
    assert tokens_of(sequences_of(Pages(), folder=tmp_path), range(200, 300)) == whole[200:]


def test_ranks_of_another_world_size_use_all_indices(tmp_path):
    for rank in range(2):
        tokens_of(sequences_of(Pages(units=40), folder=tmp_path, rank=rank), range(rank, 300, 2))
    source = Pages(units=40)
    whole = tokens_of(sequences_of(Pages(units=40)), range(310))
    assert tokens_of(sequences_of(source, folder=tmp_path), range(300, 310)) == whole[300:]
    assert len(source.reads) <= 14


def test_a_unit_that_changed_under_the_run_is_an_error(tmp_path):
    tokens_of(sequences_of(Pages(), folder=tmp_path), range(100))
    with pytest.raises(DataError, match="the file changed"):
        tokens_of(sequences_of(Pages(tag="more "), folder=tmp_path), range(100))


def test_fifty_kills_anywhere_give_the_stream_once(tmp_path):
    """Starts, reads some steps with any number of ranks and threads, loses everything but the cursor, starts again."""
    steps, batch = 150, 8
    whole = tokens_of(sequences_of(Pages(units=30), lanes=8), range(steps * batch))
    draw = random.Random(0)
    kills = sorted(draw.sample(range(1, steps), 50))
    found = {}
    for begin, end in zip([0, *kills], [*kills, steps], strict=True):
        size, threads = draw.choice([1, 2, 4]), draw.choice([0, 1, 2, 4])
        for rank in range(size):
            run = sequences_of(Pages(units=30), lanes=8, threads=threads, folder=tmp_path, rank=rank)
            numbers = [step * batch + k for step in range(begin, end) for k in range(rank, batch, size)]
            rows = tokens_of(run, numbers)
            for number, row in zip(numbers, rows, strict=True):
                assert number not in found, "read twice"
                found[number] = row
            run.reader.close()
    assert [found[n] for n in range(steps * batch)] == whole


def test_an_error_of_a_unit_reaches_whoever_reads_it():
    class Broken(Pages):
        def documents(self, unit, skipped):
            if unit.part == 5:
                raise DataError("page 5 is torn")
            yield from super().documents(unit, skipped)

    sequences = sequences_of(Broken(), threads=2)
    with pytest.raises(DataError, match="page 5 is torn"):
        tokens_of(sequences, range(200))


def test_a_unit_that_could_not_be_prefetched_is_read_again_when_it_is_needed():
    """The server may have been away for some minutes while the run had enough tokens."""

    class Away(Pages):
        is_away = True

        def documents(self, unit, skipped):
            if self.is_away:
                raise DataUnavailableError("the server is away")
            yield from super().documents(unit, skipped)

    whole, source = tokens_of(sequences_of(Pages()), range(8)), Away()
    sequences = sequences_of(source, threads=2)
    sequences.prefetch(range(4))
    wait_until(lambda: all(future.done() for future in sequences.reader._pending.values()))
    source.is_away = False
    assert tokens_of(sequences, range(8)) == whole


def test_lanes_without_any_training_text_are_an_error_not_a_loop():
    class Empty(Pages):
        def documents(self, unit, skipped):
            return iter(())

    with pytest.raises(DataError, match="no training document"):
        tokens_of(sequences_of(Empty()), range(4))


@pytest.mark.timeout(150)  # who waits for a pipe never ends
def test_lengths_that_somebody_else_prepared_are_ignored(tmp_path):
    os.mkfifo(tmp_path / "data_index_rank1.txt")
    index = LengthIndex(tmp_path, 0, "print")
    index.put(1, 10)
    with (tmp_path / "data_index_rank0.txt").open("a") as file:
        for unit, length in (("2", "9" * 5000), ("x", "1"), ("3", "30")):
            file.write(f"{unit} {length} {lanes._check(unit, length)}\n")
    found = LengthIndex(tmp_path, 0, "print")
    assert [found.lengths.get(unit) for unit in (1, 2, 3)] == [10, None, 30]


def test_the_lanes_divide_the_batch():
    assert choose_lanes(16, 1000) == 16
    assert choose_lanes(512, 1000) == 32
    assert choose_lanes(48, 1000) == 24
    assert choose_lanes(16, 5) == 4
    assert choose_lanes(7, 3) == 1


def test_validation_documents_are_collected_until_they_suffice():
    source = Pages(units=200)
    reader = UnitReader(source, TOKENIZER, 0.1, 0, LengthIndex(None, 0, ""))
    corpus = collect_validation(reader, 200)
    assert corpus.num_tokens >= 200
    assert sum(map(len, corpus.pieces)) == corpus.num_tokens, "training text is not kept"
    assert len(set(source.reads)) < 100
    wait_until(lambda: reader.tokenised.done == reader.tokenised.total)  # a thread may be one unit ahead
    assert reader.tokenised.total == len(source.reads)
    with pytest.raises(DataError, match="choose a larger fraction"):
        collect_validation(UnitReader(Pages(units=3), TOKENIZER, 1e-9, 0, LengthIndex(None, 0, "")), 200)


class Slow(Pages):
    """Reads one unit for every permit of `let`."""

    def __init__(self, units):
        super().__init__(units=units)
        self.let = threading.Semaphore(0)

    def documents(self, unit, skipped):
        assert self.let.acquire(timeout=30)
        yield from super().documents(unit, skipped)


def test_units_that_validation_does_not_need_are_not_read():
    source = Slow(units=40)
    reader = UnitReader(source, TOKENIZER, 0.5, 1, LengthIndex(None, 0, ""))
    needed, _, mine, *_ = random_order(40, 0, 0).tolist()
    reader.prefetch(mine)  # by training, before validation asks for it
    source.let.release(1)
    wait_until(lambda: reader.tokenised.done == 1)
    source.let.release(1)
    collect_validation(reader, 10)
    assert source.reads == [mine, needed]
    source.let.release(100)
    assert len(reader.read(mine).lengths) == 7
    wait_until(lambda: reader.tokenised.done == reader.tokenised.total)
    assert len(source.reads) <= 3, "one that the thread had started, and no other"
    assert source.reads.count(mine) == 1, "what training asked for is kept for it"


def test_how_many_units_are_tokenised_can_be_seen_from_outside():
    source = Slow(units=40)
    sequences = sequences_of(source, threads=1, lanes=4)
    sequences.prefetch(range(4))
    assert str(sequences.reader.tokenised) == "0 of 8 row groups tokenised"
    source.let.release(5)
    sequences.row(0)
    wait_until(lambda: len(source.reads) >= 5)
    assert str(sequences.reader.tokenised) == "5 of 8 row groups tokenised"
    source.let.release(100)
    sequences.reader.close()


def test_a_unit_that_is_read_while_the_reader_is_closed_is_not_recorded(tmp_path):
    """Its thread goes on to the end of the unit; by then the folder may be another run's."""
    arrived, released = threading.Event(), threading.Event()

    class Slow(Pages):
        def documents(self, unit, skipped):
            arrived.set()
            assert released.wait(30)
            yield from super().documents(unit, skipped)

    index = LengthIndex(tmp_path, 0, "print")
    reader = UnitReader(Slow(), TOKENIZER, 0.0, 1, index)
    reader.prefetch(3)
    pending = reader._pending[3]
    assert arrived.wait(30)
    reader.close()
    released.set()
    pending.result(30)
    assert 3 in index.lengths
    assert list(tmp_path.iterdir()) == []
