"""A cache that grows, that is full, and calls that it refuses, which change nothing."""

import numpy as np
import pytest
import torch
from torch import nn

from nsa.errors import ArgumentError, CacheFullError
from nsa.nn import KVCache
from nsa.nn.attention import DenseAttention
from tests.nn.test_cache import PATTERN, VOCABULARY, layer_of, same, small


def test_a_cache_that_grows_keeps_its_tokens_and_their_limit():
    model = small()
    tokens = torch.randint(0, VOCABULARY, (2, 400))
    cache = KVCache(model, sequences=8, max_length=64, tokens=512)
    before, rows = cache.memory(), [cache.add(), cache.add()]
    model(tokens[:, :64], cache=cache.append(64, rows))
    cache.grow(400)
    assert cache.memory()["sel"] < 3 * before["sel"]  # 8 + 8 pages instead of 8, not 8 x 7
    same(model(tokens[:, 64:], cache=cache.append(336, rows)), model(tokens)[:, 64:])
    assert cache.free_tokens == (16 - 2 * 7) * cache.page_size


def test_a_cache_grows_to_more_tokens_of_all_sequences():
    model = small(PATTERN, "model.n_layers=4")
    tokens = torch.randint(0, VOCABULARY, (2, 300))
    cache = KVCache(model, sequences=2, max_length=100, tokens=120)
    rows = [cache.add(), cache.add()]
    model(tokens[:, :60], cache=cache.append(60, rows))
    with pytest.raises(CacheFullError, match="out of pages"):
        cache.append(40, rows)
    cache.grow(300, 600)
    same(model(tokens[:, 60:], cache=cache.append(240, rows)), model(tokens)[:, 60:])
    assert cache.lengths.tolist() == [300, 300]


def test_a_cache_whose_growth_fails_half_way_goes_on(monkeypatch):
    model = small(PATTERN, "model.n_layers=4")
    tokens, built = torch.randint(0, VOCABULARY, (2, 200)), []
    cache = KVCache(model, sequences=2, max_length=100)
    model(tokens[:, :60], cache=cache)

    def fail(layer, cache):
        if cache.device.type != "meta":
            built.append(layer)
            raise torch.OutOfMemoryError
        return DenseAttention.build_cache(layer, cache)

    monkeypatch.setattr(model.blocks[1].attention, "build_cache", fail.__get__(model.blocks[1].attention))
    with pytest.raises(torch.OutOfMemoryError):
        cache.grow(1000)
    assert built
    monkeypatch.undo()
    same(model(tokens[:, 60:100], cache=cache), model(tokens[:, :100])[:, 60:])
    cache.grow(200)
    same(model(tokens[:, 100:], cache=cache), model(tokens)[:, 100:])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"sequences": 10**9},
            r"sequences: .* sequences=1000000000 and max_length=64 needs \d+ GiB, and cpu has 64",
        ),
        ({"sequences": 2**31 - 1, "max_length": 2**31 - 1}, "sequences: a cache of"),
        ({"sequences": 10**4, "max_length": 2**31 - 1, "tokens": 64}, "sequences: a cache of"),  # its page table
        ({"max_length": 2**31}, "max_length: must be at most 2147483647, got 2147483648"),
        ({"sequences": 10**20}, "sequences: must be at most"),
    ],
)
def test_a_cache_that_no_machine_could_hold_is_refused(sizes, message, monkeypatch):
    monkeypatch.setattr("nsa.nn.cache.device_memory", lambda device: 2**36)
    with pytest.raises(ArgumentError, match=message):
        KVCache(small(), **({"sequences": 1, "max_length": 64} | sizes))


def test_a_refused_append_leaves_the_cache_unchanged():
    model, other = small(), small(seed=1)
    tokens = torch.randint(0, VOCABULARY, (2, 160))
    cache = KVCache(model, sequences=2, max_length=150, tokens=150, slack=4)
    model(tokens[:, :60], cache=cache)
    refused = [
        (
            CacheFullError,
            r"sequence 0 has 60 tokens and 91 more .* 150 of `max_length`",
            tokens[:, 60:151],
            cache,
            model,
        ),
        (CacheFullError, "140 new tokens need 4 pages of 64 tokens and 2 are free", tokens[:, 60:130], cache, model),
        (ArgumentError, "cache: holds 2 sequences, and the input has 1 rows", tokens[:1, 60:61], cache, model),
        (ArgumentError, "cache: was made for another model, not for this Decoder", tokens[:, 60:61], cache, other),
        (ArgumentError, "cache: must be a KVCache", tokens[:, 60:61], {}, model),
    ]
    for error, message, chunk, given, used in refused:
        with pytest.raises(error, match=message):
            used(chunk, cache=given)
    for call, message in [
        (lambda: cache.crop(61, 0), "length: sequence 0 has 60 tokens; cannot crop it to 61"),
        (lambda: cache.crop(54, 1), "the last 4 can be taken back"),
        (lambda: cache.append(1, [0, 0]), "sequences: names a sequence twice"),
        (lambda: cache.append(1, [5]), "sequence 5 does not exist; the cache has"),
        (lambda: cache.append([1, -1]), "counts: must be at least 0"),
        (lambda: cache.append([1, 1, 1]), "counts: must be one for each of 2 sequences, got 3"),
        (lambda: KVCache(nn.Linear(2, 2), sequences=1, max_length=1), "model: has no attention layer"),
        (lambda: KVCache(model, sequences=1, max_length=0), "max_length: must be at least 1"),
        (lambda: KVCache(None, sequences=1, max_length=1), "model: has no attention layer of nsa: NoneType"),
        *(
            (lambda dtype=dtype: KVCache(model, sequences=1, max_length=9, dtype=dtype), "dtype: must be a float type")
            for dtype in (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn, "float32")
        ),
        *(
            (
                lambda given=given: KVCache(model, **({"sequences": 1, "max_length": 9} | given)),
                "must be a whole number",
            )
            for given in ({"sequences": 1.5}, {"max_length": None}, {"tokens": "9"}, {"slack": 2.0})
        ),
        (lambda: cache.crop(58.5), r"length: must be a whole number, got 58\.5"),
        (lambda: cache.crop(-1), "length: must be at least 0, got -1"),
        (lambda: cache.crop(58, "a"), "sequence: must be a whole number, got 'a'"),
        (lambda: cache.append(1.0), r"counts: must be a whole number or a list of them, got 1\.0"),
        (lambda: cache.append([1.5, 1]), r"counts: must be a whole number, got 1\.5"),
        (lambda: cache.append(None), "counts: must be a whole number or a list"),
        (lambda: cache.append(1, [0.5]), r"sequences: must be a whole number, got 0\.5"),
        (lambda: cache.grow(149), "max_length: must be at least 150, got 149"),
        (lambda: cache.grow(150, 149), "tokens: must be at least 150, got 149"),
        (lambda: cache.grow(151.0), r"max_length: must be a whole number, got 151\.0"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            call()
    with pytest.raises(CacheFullError, match="holds 2 sequences already"):
        cache.add()
    same(model(tokens[:, 60:63], cache=cache), model(tokens[:, :63])[:, -3:])
    for count in (np.int64(1), torch.tensor(1), np.array([1, 1]), torch.tensor([1, 1])):
        cache.append(count, np.array([0, 1]))
    cache.crop(np.int64(63))
    same(model(tokens[:, 63:66], cache=cache), model(tokens[:, :66])[:, -3:])


def test_a_step_belongs_to_its_input_and_its_layers():
    model, layer = small(), layer_of("nsa")
    cache = KVCache(model, sequences=2, max_length=64)
    for _ in range(2):
        cache.add()
    with pytest.raises(ArgumentError, match=r"made for \[2, 3\] tokens by `append`, and the input has \[2, 4\]"):
        model(torch.zeros(2, 4, dtype=torch.int64), cache=cache.append(3))
    x = torch.randn(2, 3, 24, dtype=torch.float64)
    with pytest.raises(ArgumentError, match="made for another model, not for this NSAAttention"):
        layer(x, cache=cache.append(3))
    inner = model.blocks[0].attention
    with pytest.raises(ArgumentError, match="belongs to a whole model; pass the result of `append` to a NSAAttention"):
        inner(torch.randn(2, 3, 32, dtype=torch.float64), cache=cache)
    with pytest.raises(ArgumentError, match="cu_seqlens: packs documents"):
        layer(
            x[:1], cache=KVCache(layer, sequences=1, max_length=9), cu_seqlens=torch.tensor([0, 3], dtype=torch.int32)
        )
    with pytest.raises(ArgumentError, match=r"cache: holds torch\.float32 and the layer computes in torch\.float64"):
        layer(x, cache=KVCache(layer, sequences=2, max_length=9, dtype=torch.float32))


def test_sequences_must_be_added_and_their_limit_is_named():
    cache = KVCache(small(), sequences=2, max_length=64)
    with pytest.raises(ArgumentError, match="sequences: the cache has none; call `add` once for every row"):
        cache.append(3)
    with pytest.raises(ArgumentError, match=r"holds 0 sequences, and the input has 3 rows; .* sequences=2"):
        cache.model(torch.zeros(3, 4, dtype=torch.int64), cache=cache)


def test_after_a_refused_crop_the_sequence_can_be_cropped_to_zero():
    model = small()
    tokens = torch.randint(0, VOCABULARY, (1, 100))
    cache = KVCache(model, sequences=1, max_length=100, slack=4)
    model(tokens, cache=cache)
    with pytest.raises(ArgumentError, match="Crop to 0 and compute it again"):
        cache.crop(50)
    cache.crop(0)
    same(model(tokens[:, :50], cache=cache), model(tokens[:, :50]))
