"""Decoding on a GPU: prompt and steps against the whole sequence, and CUDA graphs against plain steps."""

import pytest
import torch

import nsa
from nsa.config.load import parse_config
from nsa.generate.batch import TokenBatch
from nsa.generate.sampling import Sampling
from nsa.nn import Decoder, KVCache
from nsa.nn.cache_step import CacheStep
from nsa.nn.model import build_model
from tests.nn.test_cache import in_chunks, randomize_gates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
VARIANTS = {
    "pattern": ["model.layer_pattern=[nsa,dense,window,msa]", "msa.block=64", "msa.num_selected=8"],
    "msa": ["model.attention=msa", "msa.block=32", "msa.num_selected=16", "model.qk_norm=true", "msa.index_dim=32"],
    "mlp": ["nsa.phi=mlp", "model.qk_norm=true"],
    "shared": ["nsa.shared_kv=true"],
    "192/128": ["model.head_dim_k=192", "model.head_dim_v=128"],
    "all blocks": ["nsa.num_selected=24"],  # of 1,500 tokens: rounding cannot change which blocks are read
}


def model_of(*overrides: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    sizes = ["model.dim=256", "model.n_layers=4", "nsa.num_selected=8", "nsa.window=128"]
    config = parse_config({}, "test", [*sizes, *overrides])
    model = build_model(config, 512, 0).cuda().eval()
    randomize_gates(model)
    return model.to(dtype)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 3e-2), (torch.float32, 1e-4)], ids=["bf16", "fp32"])
def test_prompt_and_steps_equal_the_whole_sequence(variant, dtype, most):
    model = model_of(*VARIANTS[variant], dtype=dtype)
    tokens = torch.randint(0, 512, (3, 1500), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        want = model(tokens).float()
        cache = KVCache(model, sequences=3, max_length=1500)
        got = in_chunks(model, tokens, cache, [700, 1, 1, 300, 5, 64, 400, *([1] * 29)]).float()
    by_position = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert by_position.median() <= most
    # Where rounding changes which blocks are read, a few positions differ more.
    assert (by_position > 3 * most).float().mean() <= (0.0 if variant == "all blocks" else 0.01)


@pytest.mark.parametrize("first_room", [4096, 8])  # the cache grows, and the graphs are captured again
def test_graphs_give_the_tokens_of_plain_steps_for_rows_that_end_at_different_times(first_room, monkeypatch):
    monkeypatch.setattr("nsa.generate.batch.FIRST_ROOM", first_room)
    model = model_of(*VARIANTS["pattern"], dtype=torch.float32)
    prompts = [torch.randint(0, 512, (n,)).tolist() for n in (1, 31, 500)]
    drawn = []
    for is_graphed in (True, False):
        batch = TokenBatch(model, prompts, 100, Sampling(temperature=0.0), [0, 0, 0])
        batch._graphs = batch._graphs if is_graphed else None
        found = []
        for step in range(100):
            found.append(dict(batch.next()))
            if step in (20, 60):
                batch.end(batch.rows[-1])
        drawn.append(found)
    assert drawn[0] == drawn[1]
    assert [len(tokens) for tokens in drawn[0]] == [3] * 21 + [2] * 40 + [1] * 39


def test_a_step_never_waits_for_the_gpu():
    model = model_of(*VARIANTS["pattern"])
    cache = KVCache(model, sequences=2, max_length=300)
    tokens = torch.randint(0, 512, (2, 1), device="cuda")
    model(torch.randint(0, 512, (2, 100), device="cuda"), cache=cache)
    slots = torch.arange(2, dtype=torch.int32, device="cuda")
    count = torch.ones_like(slots)

    def step() -> torch.Tensor:
        cache.reserve([1, 1], [0, 1])
        return model(tokens, cache=CacheStep(cache, slots, count, 1, cache.width, is_fresh=False, completes=True))

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):  # over the end of a page
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.lengths.tolist() == [141, 141]


def test_a_prompt_draws_the_same_alone_and_in_a_batch():
    model = model_of(dtype=torch.float32)
    prompts = [torch.randint(0, 512, (n,)).tolist() for n in (3, 200)]
    options = {"max_tokens": 40, "temperature": 0.5, "seed": 7}
    both = list(nsa.generate_tokens(model, prompts, **options))
    for number, prompt in enumerate(prompts):
        alone = [piece.token for piece in nsa.generate_tokens(model, [prompt], **options)]
        assert [piece.token for piece in both if piece.prompt == number] == alone
