"""Every kernel compiles for sm_80, 86, 89, 90, 100 and 120 within what the cards have, without a GPU."""

import pytest
import torch

from nsa.ops.triton import decode
from nsa.ops.triton.windowed import windowed
from tests.ops.triton.compiling import Compiler, Plan, attend, narrow_strides, recording

SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
TENSOR_MEMORY_LIMIT = 512  # columns, of sm_100
KERNELS = {
    "_mean_kernel", "_mean_backward_kernel", "_contract_kernel", "_contract_dx_kernel", "_contract_dweight_kernel",
    "forward_kernel", "dq_kernel", "dkv_kernel", "score_kernel", "pick_kernel", "_tile_lists_kernel",
    "_attend_kernel", "_mark_kernel", "_count_kernel", "_plan_kernel", "_scatter_kernel", "_block_grads_kernel",
    "_mix_kernel", "_mix_backward_kernel", "_add_kernel",
    "block_max_kernel", "index_lse_kernel", "merge_lse_kernel", "loss_kernel",
    "merge_grads_kernel", "sum_keys_kernel",
    "_norm_kernel", "_norm_backward_kernel", "_activate_kernel", "_activate_backward_kernel",
}  # fmt: skip
# Of selected attention with few heads in a group, on cards of class "sm90".
PARTS_KERNELS = {"_attend_block_kernel", "_merge_kernel"}
STEP_KERNELS = {"product_kernel", "place_kernel"}
MSA_STEP_KERNELS = ("index_scores_kernel", "chosen_kernel")
ATTENTION_OF_STEPS = ("interval_kernel", "blocks_kernel", "mix_parts_kernel", "merge_kernel", *MSA_STEP_KERNELS)
DECODE_KERNELS = {*ATTENTION_OF_STEPS} | STEP_KERNELS
PRODUCTION = [Plan(1, 65536, 64, 4, 128, 128), Plan(16, 2048, 12, 2, 64, 64)]
UNUSUAL = [
    Plan(1, 32768, 32, 8, 128, 128, packed=True),
    Plan(1, 4096, 64, 4, 192, 128),
    Plan(1, 4096, 16, 4, 256, 256),
    Plan(1, 4096, 6, 1, 96, 80, "float32"),
]
STEPS = [Plan(32, 65536, 64, 4, 128, 128, new=1), Plan(1, 32768, 12, 2, 64, 64, new=1)]
ONE_SEQUENCE = [
    Plan(1, 65536, 64, 4, 128, 128, new=1),
    Plan(1, 8192, 64, 4, 128, 128, new=1),
    Plan(1, 8192, 16, 4, 256, 256, new=1),
]
# Of the 125M and the 1B model: one sequence, and several.
AROUND_STEPS = [
    Plan(batch, 8192, heads, groups, 64, 64, new=1)
    for batch, heads, groups in ((1, 12, 2), (8, 12, 2), (1, 32, 8), (32, 32, 8))
]
UNUSUAL_STEPS = [
    Plan(4, 8192, 64, 4, 128, 128, new=4),
    Plan(2, 4096, 64, 4, 192, 128, new=1),
    Plan(2, 4096, 16, 4, 256, 256, new=8),
    Plan(2, 4096, 6, 1, 96, 80, "float32", new=1),
    Plan(2, 4096, 8, 8, 256, 256, "float32", new=1),
]
# A few values parked around a loop cost nothing; a loop that spills needs hundreds of bytes.
SPILLED = {"_block_grads_kernel": 512, "loss_kernel": 512}


# Strides of which products may be in 32 bits: `selection.forward` has counted that they fit.
NARROW = {"score_kernel": {"stride_kn"}, "block_max_kernel": {"stride_ks"}}

# Those that hold most in shared memory: compressed attention, the selected blocks and their gradients.
LARGEST = ("forward_kernel", "dkv_kernel", "_attend_kernel", "_block_grads_kernel", "loss_kernel", "block_max_kernel")


@pytest.fixture(scope="session")
def compiler():
    compiler = Compiler()
    yield compiler
    compiler.end()


def check(compiler, archs, plan, spilled, only=()):
    kernels = compiler.taken(archs, plan, only)
    for arch in archs:
        found = {k.kernel for k in kernels if k.arch == arch}
        parts = PARTS_KERNELS if arch in (90, 100) and plan == UNUSUAL[0] else set()
        assert found >= set(only or (DECODE_KERNELS if plan.new else KERNELS | parts))
    for kernel in kernels:
        assert kernel.shared <= SHARED_LIMIT[kernel.arch], kernel
        assert kernel.tensor_memory <= TENSOR_MEMORY_LIMIT, kernel
        assert kernel.spilled <= max(spilled, SPILLED.get(kernel.kernel, 0)), kernel
        assert not kernel.serialized, kernel
        assert set(kernel.narrow) == NARROW.get(kernel.kernel, set()), kernel


@pytest.mark.parametrize(("plan", "only"), [(PRODUCTION[0], ()), (PRODUCTION[1], (*LARGEST, "dq_kernel"))], ids=str)
def test_production_kernels_fit_the_card(compiler, plan, only):
    check(compiler, [90], plan, spilled=128, only=only)


@pytest.mark.parametrize(
    ("arch", "spilled"),
    [(80, 128), (86, 1024), (100, 1024), pytest.param(120, 1024, marks=pytest.mark.long)],  # 120: the launches of 86
)
def test_the_largest_kernels_fit_cards_that_nothing_was_run_on(compiler, arch, spilled):
    check(compiler, [arch], PRODUCTION[0], spilled, only=LARGEST)
    if arch == 86:  # the same launches and limits
        check(compiler, [89], PRODUCTION[0], spilled, only=LARGEST[3:4])


@pytest.mark.parametrize(
    "plan",
    [pytest.param(Plan(1, 32768, 32, 8, 128, 128), marks=pytest.mark.long), Plan(4, 8192, 12, 2, 64, 64)],
    ids=str,
)
def test_kernels_of_groups_of_few_heads_fit_the_card(compiler, plan):
    check(compiler, [90, 100], plan, spilled=128, only=(*PARTS_KERNELS, "_block_grads_kernel"))


@pytest.mark.parametrize(
    ("arch", "plan", "only"),
    [(90, STEPS[0], ATTENTION_OF_STEPS), (80, STEPS[0], ATTENTION_OF_STEPS), (90, STEPS[1], ATTENTION_OF_STEPS),
     (90, ONE_SEQUENCE[0], (*ATTENTION_OF_STEPS[:3], *MSA_STEP_KERNELS))],
)  # fmt: skip
def test_decode_kernels_fit_the_card(compiler, arch, plan, only):
    check(compiler, [arch], plan, spilled=32, only=only)


@pytest.mark.parametrize("plan", AROUND_STEPS, ids=str)
def test_kernels_around_a_step_fit_the_card(compiler, plan):
    others = [80, 86, 89, 100, 120] if plan == AROUND_STEPS[0] else []
    check(compiler, [90, *others], plan, spilled=0, only=sorted(STEP_KERNELS))


@pytest.mark.long
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("plan", STEPS + ONE_SEQUENCE + AROUND_STEPS + UNUSUAL_STEPS, ids=str)
def test_decode_kernels_of_other_shapes_fit_every_card(compiler, arch, plan):
    is_usual = arch in (80, 90) and plan in (*STEPS, ONE_SEQUENCE[0])
    check(compiler, [arch], plan, spilled=32 if is_usual else 128)


@pytest.mark.long
@pytest.mark.parametrize("plan", AROUND_STEPS[1:], ids=str)
def test_kernels_around_a_step_fit_every_card(compiler, plan):
    check(compiler, [80, 86, 89, 100, 120], plan, spilled=0, only=sorted(STEP_KERNELS))


@pytest.mark.long
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("plan", PRODUCTION + UNUSUAL, ids=str)
def test_kernels_of_other_shapes_fit_the_card(compiler, arch, plan):
    check(compiler, [arch], plan, spilled=128 if plan in PRODUCTION else 1024)


@pytest.mark.long
@pytest.mark.parametrize("arch", [86, 89, 100, 120])
@pytest.mark.parametrize("plan", PRODUCTION + UNUSUAL, ids=str)
def test_all_kernels_fit_cards_that_nothing_was_run_on(compiler, arch, plan):
    check(compiler, [arch], plan, spilled=1024)


@pytest.mark.parametrize(("heads", "groups", "dim"), [(12, 2, 64), (64, 4, 128)])
@pytest.mark.parametrize("packed", [False, True])
def test_kernels_of_a_million_tokens_have_wide_offsets_where_32_bits_overflow(heads, groups, dim, packed):
    tokens = 1 << 20
    with recording(90) as launches:
        attend(Plan(1, tokens, heads, groups, dim, dim, packed=packed))
    wide = {kernel.__name__: options["WIDE"] for kernel, _, options in launches if "WIDE" in options}
    few = {"_attend_block_kernel": False} if heads // groups < 8 else {}  # over a stretch of the queries
    few |= dict.fromkeys(("block_max_kernel", "index_lse_kernel", "loss_kernel"), False)
    assert wide == {"score_kernel": False, "_block_grads_kernel": tokens * heads * dim >= 1 << 31} | few
    assert len([kernel for kernel, *_ in launches if kernel.__name__ == "_block_grads_kernel"]) > groups, "in turns"


def test_a_dense_layer_compiles_no_kernel_for_a_number_of_keys():
    """In training, in a prompt in chunks and over the pages of a cache: its window is the number of keys. A kernel
    takes seconds to compile."""
    ends = []
    for keys in (256, 512, 1024):
        k = torch.empty(1, keys, 2, 64, dtype=torch.bfloat16, device="meta")
        table, positions = (torch.empty(1, size, dtype=torch.int32, device="meta") for size in (keys // 64, 32))
        pages = k.view(keys // 64, 64, 2, 64)
        with recording(90) as launches:
            for tokens in (32, keys):
                q = k[:, :tokens]
                o, lse = windowed.forward(q, k, k, keys, None, q_offset=keys - tokens)
                windowed.backward(o, q, k, k, o, lse, keys, None, q_offset=keys - tokens)
            decode.paged(k[:, :32], pages, pages, table, positions, 8192)
        ends.append(
            [
                [kernel.__name__, *(options[name] for name in ("SPAN", "STRIDE", "WINDOW"))]
                for kernel, _, options in launches
                if "WINDOW" in options
            ]
        )
    assert len(ends[0]) == 8
    assert ends[0] == ends[1] == ends[2]


def test_a_stride_that_is_multiplied_in_32_bits_is_found():
    source = """
  tt.func public @kernel(%q: !tt.ptr<bf16>, %stride_qs: i32 {tt.divisibility = 16 : i32}, %k_sn: i32, %q_ss: i32) {
    %0 = arith.extsi %k_sn : i32 to i64 loc(#1)
    %1 = arith.muli %0, %c : i64 loc(#2)
    %2 = tt.splat %stride_qs : i32 -> tensor<64xi32> loc(#3)
    %3 = arith.muli %2, %range : tensor<64xi32> loc(#4)
    %4 = arith.muli %t, %q_ss {overflow = 1 : i32} : i32 loc(#5)
    """
    assert narrow_strides(source) == ["q_ss", "stride_qs"]


def test_every_kernel_file_classifies_a_card_alike():
    """sm_120 is newer than sm_90 and has less shared memory than sm_80: no kernel may take Hopper's tiles there."""
    plan = UNUSUAL[0]
    launches = {}
    for arch in (80, 86, 89, 90, 100, 120):
        with recording(arch) as recorded:
            attend(plan)
        launches[arch] = [
            (
                kernel.__name__,
                options["num_warps"],
                options.get("num_stages"),
                options.get("BLOCK_M"),
                options.get("ROWS"),
            )
            for kernel, _, options in recorded
            if "num_warps" in options
        ]
    assert launches[86] == launches[89] == launches[120]
    assert launches[86] != launches[80] != launches[90] == launches[100]
    for small, large in zip(launches[86], launches[80], strict=True):
        assert small[:2] == large[:2]
        assert small[2] is None or small[2] <= large[2]
