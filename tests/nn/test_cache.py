"""Decoding with a cache gives what the whole sequence gives, however the tokens are split, joined and taken back."""

import copy
import random
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from nsa.config.load import parse_config
from nsa.errors import ArgumentError, CacheFullError
from nsa.nn import Decoder, KVCache, NSAAttention, attention_layers
from nsa.nn.attention import Attention, DenseAttention, MSAAttention, WindowAttention
from nsa.nn.cache_step import CacheStep
from nsa.nn.model import build_model
from nsa.ops import MSASpec, NSASpec

SPEC = NSASpec(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=4, num_init=1, num_local=1, window=24)
MSA_SPEC = MSASpec(block=16, num_selected=3)
# Around the ends of a stride, a compressed block, a selection block, the window, its ring with a slack of 5, a page.
BORDERS = (1, 3, 4, 5, 7, 8, 9, 12, 13, 15, 16, 17, 23, 24, 25, 29, 30, 32, 33, 63, 64, 65, 90)
VOCABULARY = 64
PATTERN = "model.layer_pattern=[nsa,dense,window,msa]"
VARIANTS = {
    "pattern": [PATTERN, "model.n_layers=4"],
    "scaled": [PATTERN, "model.n_layers=4", "model.rope_scaling.factor=4", "model.rope_scaling.original_length=32"],
    "part of a head": [
        PATTERN,
        "model.n_layers=4",
        "model.head_dim_k=32",
        "model.rotary_dim=16",
        "model.activation=swiglu_oai",
    ],
    "mlp": ["nsa.phi=mlp", "model.qk_norm=true"],
    "shared": ["nsa.shared_kv=true", "model.qk_norm=true"],
    "shared mlp": ["nsa.shared_kv=true", "nsa.phi=mlp", "nsa.gate=softmax"],
    "mean_mlp": ["nsa.phi=mean_mlp", "model.qkv_bias=true", "model.rope_scaling.factor=4.0"],
    "rotated first": ["nsa.compress=after_rotation", "nsa.phi=mean_mlp"],
    "shared, rotated first": ["nsa.compress=after_rotation", "nsa.shared_kv=true"],
    "msa": ["model.attention=msa", "model.qk_norm=true", "model.qkv_bias=true", "msa.index_dim=32"],
    "msa, narrow index": ["model.attention=msa", "model.head_dim_k=32", "msa.index_dim=16"],
    "cmp": ["nsa.force_branch=cmp"],
    "sel": ["nsa.force_branch=sel"],
    "win": ["nsa.force_branch=win"],
}


def small(*overrides: str, seed: int = 0) -> Decoder:
    sizes = "model.dim=32 model.n_layers=2 model.n_heads=4 model.n_kv_heads=2 model.head_dim_k=16 model.head_dim_v=32"
    spec = [f"nsa.{name}={value}" for name, value in vars(SPEC).items()]
    if any("msa" in override for override in overrides):
        spec += [f"msa.{name}={value}" for name, value in vars(MSA_SPEC).items()]
    config = parse_config({}, "test", [*sizes.split(), *spec, *overrides])
    model = build_model(config, VOCABULARY, seed).double().eval()
    randomize_gates(model)
    return model


def randomize_gates(module: nn.Module) -> None:
    """They start equal for all tokens, and an MLP beside the mean at zero, which would hide a mistake."""
    for name, parameter in module.named_parameters():
        if "gate.out" in name or ("phi_" in name and ".out." in name):
            nn.init.normal_(parameter)


def layer_of(kind: str, **options: object) -> Attention:
    kinds = {
        "nsa": partial(NSAAttention, spec=SPEC),
        "msa": partial(MSAAttention, spec=MSA_SPEC),
        "dense": DenseAttention,
        "window": partial(WindowAttention, window=SPEC.window),
    }
    layer = kinds[kind](24, 4, 2, 16, 32, **options)
    randomize_gates(layer)
    return layer.double().eval()


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def in_chunks(model: nn.Module, x: Tensor, cache: KVCache, sizes: list[int]) -> Tensor:
    return torch.cat([model(chunk, cache=cache) for chunk in x.split(sizes, dim=1)], dim=1)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("nsa", {}),
        ("nsa", {"phi": "mlp"}),
        ("nsa", {"shared_kv": True}),
        ("msa", {}),
        ("dense", {}),
        ("window", {}),
    ],
    ids=["nsa", "mlp", "shared", "msa", "dense", "window"],
)
def test_a_prompt_of_any_length_and_single_steps_equal_the_whole_sequence(kind, options):
    layer = layer_of(kind, **options)
    x = torch.randn(1, BORDERS[-1] + 3, 24, dtype=torch.float64)
    want = layer(x)
    for length in BORDERS:
        cache = KVCache(layer, sequences=1, max_length=x.shape[1], slack=5)
        same(in_chunks(layer, x[:, : length + 3], cache, [length, 1, 1, 1]), want[:, : length + 3])
    cache = KVCache(layer, sequences=1, max_length=x.shape[1], slack=5)
    same(in_chunks(layer, x, cache, [1] * x.shape[1]), want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_chunking_of_a_batch_equals_the_whole_sequence(variant):
    model = small(*VARIANTS[variant])
    tokens = torch.randint(0, VOCABULARY, (2, 130))
    want = model(tokens).detach()
    for seed in range(2):
        drawn = random.Random(seed)
        sizes: list[int] = []
        while sum(sizes) < 130:
            sizes.append(min(130 - sum(sizes), drawn.choice([1, 2, 3, 5, 8, 17, 40, 65, 90])))
        cache = KVCache(model, sequences=2, max_length=130, slack=drawn.choice([1, 3, 16, 64]))
        same(in_chunks(model, tokens, cache, sizes), want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_in_long_chunks_runs_on_the_training_operators(variant, monkeypatch):
    model = small(*VARIANTS[variant])
    tokens = torch.randint(0, VOCABULARY, (2, 214))
    want = model(tokens).detach()
    cache = KVCache(model, sequences=2, max_length=214, slack=3)
    with monkeypatch.context() as patch:
        for _, layer in attention_layers(model):
            patch.setattr(layer, "attend_cached", None)
        same(in_chunks(model, tokens[:, :207], cache, [7, 65, 135]), want[:, :207])
    same(in_chunks(model, tokens[:, 207:], cache, [1, 6]), want[:, 207:])


def test_rows_of_different_lengths_equal_each_alone():
    model = small(PATTERN, "model.n_layers=4")
    tokens = torch.randint(0, VOCABULARY, (3, 320))
    want = model(tokens).detach()
    cache = KVCache(model, sequences=3, max_length=320, slack=8)
    rows = [cache.add() for _ in range(3)]
    at, drawn = [0, 0, 0], random.Random(0)
    few = [[drawn.randint(0, 12) for _ in rows] for _ in range(6)]
    # Many new tokens in rows of different lengths, of a length (35 + 70 = 8 + 97), beside few or none in others.
    many = [[1, 1, 90], [1, 0, 1], [70, 97, 3], [65, 80, 1], [0, 70, 100]]
    for counts in [[33, 7, 0], *many, *few]:
        chunk = torch.zeros(3, max(counts), dtype=torch.int64)
        for row, count in enumerate(counts):
            chunk[row, :count] = tokens[row, at[row] : at[row] + count]
        got = model(chunk, cache=cache.append(counts, rows))
        for row, count in enumerate(counts):
            same(got[row, :count], want[row, at[row] : at[row] + count])
            at[row] += count
    assert [cache.length(row) for row in rows] == at == cache.lengths.tolist()


@pytest.mark.parametrize("variant", ["pattern", "shared", "mlp", "msa"])
def test_cropped_tokens_do_not_affect_later_tokens(variant):
    """As when drafted tokens are verified, and some of them rejected."""
    model, slack = small(*VARIANTS[variant]), 9
    tokens, drafts = torch.randint(0, VOCABULARY, (2, 1, 100))
    want, drawn = model(tokens).detach(), random.Random(0)
    cache = KVCache(model, sequences=1, max_length=110, slack=slack)
    at = 30
    same(model(tokens[:, :at], cache=cache), want[:, :at])
    while at < 90:
        right, wrong = drawn.randint(1, slack // 2), drawn.randint(0, slack // 2)
        chunk = torch.cat([tokens[:, at : at + right], drafts[:, :wrong]], dim=1)
        same(model(chunk, cache=cache)[:, :right], want[:, at : at + right])
        at += right
        cache.crop(at)
    assert cache.length(0) == at


@pytest.mark.parametrize("operations", [150, pytest.param(1000, marks=pytest.mark.long)])
def test_many_operations_agree_with_plain_lists_of_tokens(operations):
    """Append, crop, free and join, in a pool that is often full; a refused operation changes nothing."""
    model = small("model.layer_pattern=[nsa,window]", "model.dim=16", "model.mlp_dim=16")
    cache = KVCache(model, sequences=4, max_length=200, tokens=256, slack=7)
    drawn, lists, refused = random.Random(0), dict[int, list[int]](), 0
    for _ in range(operations):
        kind = drawn.choice(["append"] * 6 + ["crop"] * 2 + ["free", "join"])
        before = ({s: len(tokens) for s, tokens in lists.items()}, cache.free_tokens)
        try:
            if kind == "join":
                lists[cache.add()] = []
            elif lists and kind == "free":
                sequence = drawn.choice(list(lists))
                cache.free(sequence)
                del lists[sequence]
            elif lists and kind == "crop":
                sequence = drawn.choice(list(lists))
                length = max(0, len(lists[sequence]) - drawn.choice([0, 1, 5, 7, 8, 30]))
                cache.crop(length, sequence)
                del lists[sequence][length:]
            elif lists:
                rows = drawn.sample(list(lists), drawn.randint(1, len(lists)))
                append(model, cache, lists, rows, [drawn.choice([0, 1, 1, 1, 4, 30, 66]) for _ in rows], drawn)
        except (CacheFullError, ArgumentError):
            refused += 1
            assert ({s: cache.length(s) for s in cache.sequences}, cache.free_tokens) == before
        assert {s: cache.length(s) for s in cache.sequences} == {s: len(tokens) for s, tokens in lists.items()}
    assert operations / 50 < refused < operations / 2
    for sequence, known in lists.items():  # what is left is still right
        if 0 < len(known) <= 197:
            new = [1, 2, 3]
            got = model(torch.tensor([new]), cache=cache.append(3, [sequence]))
            same(got[0], model(torch.tensor([known + new]))[0, -3:])
    for sequence in list(lists):
        cache.free(sequence)
    assert cache.free_tokens == 256 + 4 * cache.page_size


def append(model, cache, lists, rows, counts, drawn):
    new = [[drawn.randrange(VOCABULARY) for _ in range(count)] for count in counts]
    step = cache.append(counts, rows)
    got = model(torch.tensor([tokens + [0] * (max(counts) - len(tokens)) for tokens in new]), cache=step)
    for place, (sequence, tokens) in enumerate(zip(rows, new, strict=True)):
        lists[sequence] += tokens
        if tokens and drawn.random() < 0.1:  # the last token, which saw all others
            whole = model(torch.tensor([lists[sequence]]))
            same(got[place, len(tokens) - 1], whole[0, -1])


@pytest.mark.parametrize("variant", ["pattern", "shared mlp", "msa"])
def test_a_copy_of_a_cache_is_independent(variant):
    model = small(*VARIANTS[variant])
    tokens = torch.randint(0, VOCABULARY, (2, 100))
    cache = KVCache(model, sequences=2, max_length=100)
    model(tokens[:, :60], cache=cache)
    forked = copy.deepcopy(cache)
    assert forked.model is model
    model(tokens[:, :40], cache=forked)
    same(model(tokens[:, 60:], cache=cache), model(tokens)[:, 60:])
    assert (cache.length(0), forked.length(0)) == (100, 100)
    forked.crop(60)
    same(model(tokens[:, 60:], cache=forked), model(tokens)[:, 60:])
    both = copy.deepcopy([model, KVCache(model, sequences=1, max_length=9)])
    assert both[1].model is both[0], "copied together with its model, it is that of the copy"


def test_a_cache_is_only_as_large_as_its_branches_need():
    long, short = (KVCache(small(PATTERN, "model.n_layers=4"), sequences=2, max_length=n).memory() for n in (640, 64))
    assert (long["win"], long["tail"], long["window"]) == (short["win"], short["tail"], short["window"])
    page = 64 * 2 * (16 + 32) * 8  # tokens, heads, keys and values, bytes
    assert long["sel"] == long["dense"] == long["msa"] == (2 * 10 + 1) * page
    assert long["index"] == (2 * 10 + 1) * 64 * 16 * 8  # one head of keys alone
    assert long["cmp"] == long["sel"] // SPEC.cmp_stride
    shared = KVCache(small("nsa.shared_kv=true"), sequences=2, max_length=640).memory()
    separate = KVCache(small(), sequences=2, max_length=640).memory()
    assert shared["win"] == 0
    assert shared["tail"] == separate["tail"] // 3  # keys of 16 channels, no values of 32
    assert shared["sel"] == separate["sel"]


def test_a_wrapped_layer_has_one_place_in_the_cache():
    layers = [layer_of("nsa"), layer_of("dense"), layer_of("msa")]
    model = nn.Sequential(torch.compile(layers[0], backend="eager"), checkpoint_wrapper(layers[1]), layers[2])
    assert list(KVCache(model, sequences=1, max_length=64).layers) == layers


def test_an_msa_layer_that_warms_its_index_up_reads_the_whole_cache():
    layer, dense = layer_of("msa"), layer_of("dense")
    dense.load_state_dict({name: x for name, x in layer.state_dict().items() if "index" not in name})
    x = torch.randn(1, 90, 24, dtype=torch.float64)
    for is_dense in (False, True):
        layer.is_dense = is_dense
        got = in_chunks(layer, x, KVCache(layer, sequences=1, max_length=90), [70, 19, 1])
        same(got, layer(x))
        assert torch.allclose(got, dense(x)) == is_dense


def test_a_cached_pass_has_no_gradient_and_training_does_not_see_the_cache():
    model = small(PATTERN, "model.n_layers=4")
    tokens = torch.randint(0, VOCABULARY, (1, 40))
    cache = KVCache(model, sequences=1, max_length=40)
    before = model(tokens)
    assert not model(tokens[:, :30], cache=cache).requires_grad
    assert not model(tokens[:, 30:], cache=cache).requires_grad
    assert not any(x.requires_grad for layer in cache.layers.values() for part in layer.parts().values() for x in part)
    assert torch.equal(model(tokens), before)
    assert before.requires_grad


def test_under_autocast_the_cache_has_the_type_of_the_products():
    layer = layer_of("nsa").float()
    x = torch.randn(1, 40, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        cache = KVCache(layer, sequences=1, max_length=40)
        assert cache.dtype == torch.bfloat16
        got = in_chunks(layer, x, cache, [33, 7])
        want = layer(x)
    assert (got - want).float().norm() <= 2e-2 * want.float().norm()


def test_a_step_of_fixed_shape_serves_every_length():
    """What a CUDA graph replays: always the same tensors, the whole page table, rows that have ended as padding."""
    model = small(PATTERN, "model.n_layers=4")
    tokens = torch.randint(0, VOCABULARY, (2, 100))
    want = model(tokens).detach()
    cache = KVCache(model, sequences=2, max_length=200, slack=5)
    rows = [cache.add(), cache.add()]
    model(tokens[:, :20], cache=cache.append([20, 9], rows))
    slots, count = torch.tensor(rows, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    for step in range(70):
        if step == 50:
            cache.free(rows.pop())
            count[1] = 0
        cache.reserve([1] * len(rows), rows)
        at = [20 + step, min(9 + step, 59)]
        fixed = CacheStep(cache, slots, count, 1, cache.width, is_fresh=False, completes=True)
        got = model(tokens[[0, 1], at][:, None], cache=fixed)
        for row in range(len(rows)):
            same(got[row, 0], want[row, at[row]])
    assert cache.length(rows[0]) == int(cache.lengths[rows[0]]) == 90
