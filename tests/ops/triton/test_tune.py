"""`python -m bench.tune` times what it says: every candidate is really launched."""

import pytest
import torch

from bench import decode as bench_decode
from bench import msa_decode as bench_msa_decode
from bench import tune
from bench.shapes import SPEC, Inputs
from nsa.ops.triton import decode, flash, msa_decode
from nsa.ops.triton.launch_table import Card
from tests.ops.triton.compiling import recording


def meta_inputs(shape, *, correlated):
    def tensor(heads, dim=shape.dim):
        return torch.empty(shape.batch, shape.tokens, heads, dim, dtype=torch.bfloat16, device="meta")

    return Inputs(tensor(shape.heads), *(tensor(shape.groups) for _ in range(6)), tensor(shape.heads, 3))


def launched(launches, kernel):
    """The options of the last launch of a kernel."""
    return [options for recorded, _, options in launches if recorded.__name__.lstrip("_") == kernel][-1]


def assert_launched(launches, kernel, launch, rows, columns):
    options = launched(launches, kernel)
    assert (options["num_warps"], options["num_stages"]) == (launch.num_warps, launch.num_stages)
    assert (rows(options), columns(options)) == (launch.rows, launch.columns)


def assert_tiles_launched(launches, kernel, plan):
    launch = plan.large if plan.method in ("tile", "parts") else plan.small
    assert_launched(launches, kernel, launch, lambda o: o["ROWS"], lambda o: o["KEYS"])
    if plan.method in ("adaptive", "parts"):
        ratios = [args[12] for recorded, args, _ in launches if recorded.__name__ == "_tile_lists_kernel"]
        assert ratios[-1] == plan.ratio


@pytest.fixture(autouse=True)
def _on_meta_tensors(monkeypatch):
    monkeypatch.setattr(tune, "make_inputs", meta_inputs)


@pytest.mark.parametrize("branch", ["cmp", "win"])
def test_every_candidate_of_compressed_and_window_attention_is_launched(branch):
    with recording(90) as launches:
        for case in tune.cases([branch], ["64", "128"]):
            kernel = case.name.split()[0].removeprefix(f"{branch}_")
            for launch in (case.default, *(c for c in case.candidates if c != tune.CUDNN)):
                launches.clear()
                case.run(launch)
                options = launched(launches, f"{kernel}_kernel")
                assert options["MASK"] == flash._MASKS[launch.mask]
                assert (options["q_tma" if kernel == "dkv" else "k_tma"] is not None) == launch.tma
                assert_launched(launches, f"{kernel}_kernel", launch, lambda o: o["BLOCK_M"], lambda o: o["BLOCK_N"])


def test_every_candidate_of_selection_is_launched():
    with recording(90) as launches:
        for case in tune.cases(["select"], ["64", "128"]):
            for score, pick in (case.default, *case.candidates):
                launches.clear()
                case.run((score, pick))
                assert launched(launches, "pick_kernel")["num_warps"] <= pick.num_warps
                if any(recorded.__name__ == "score_kernel" for recorded, *_ in launches):
                    options = launched(launches, "score_kernel")
                    assert options["BJ"] * options["BC"] == score.rows
                    assert options["HEADS"] * options["QT"] <= score.columns
                    assert (options["num_warps"], options["num_stages"], options["maxnreg"]) == (
                        score.num_warps, score.num_stages, score.maxnreg,
                    )  # fmt: skip


def test_every_candidate_of_selected_attention_is_launched():
    with recording(90) as launches:
        for case in tune.cases(["sel"], ["64", "128"]):
            for plan in (case.default, *case.candidates):
                launches.clear()
                case.run(plan)
                if case.name.startswith("sel_forward"):
                    assert_tiles_launched(launches, "attend_kernel", plan)
                    continue
                options = launched(launches, "block_grads_kernel")
                assert options["FUSED"] == (plan.dq == "fused")
                assert_launched(launches, "block_grads_kernel", plan.block, lambda o: o["ROWS"], lambda o: o["KEYS"])
                if plan.dq == "separate":
                    assert_tiles_launched(launches, "query_grads_kernel", plan.query)


def test_no_two_candidates_make_the_same_launches():
    """Else a sweep would time one launch under several names."""

    def plain(values):
        return [value for value in values if not isinstance(value, torch.Tensor)]

    with recording(90) as launches:
        for case in tune.cases(["cmp", "win", "select", "sel"], ["64", "128"]):
            seen = set()
            candidates = [case.default, *(c for c in case.candidates if c != tune.CUDNN)]
            for candidate in candidates:
                launches.clear()
                case.run(candidate)
                seen.add(str([(k.__name__, plain(args), plain(options.values())) for k, args, options in launches]))
            assert len(seen) == len(candidates), case.name


def test_every_candidate_of_decoding_is_launched():
    def tensor(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    def pools(length):
        return tensor(9, length, 4, 128), tensor(9, length, 4, 128)

    table = tensor(2, 1024, dtype=torch.int32)
    q, gates, positions = tensor(2, 1, 64, 128), tensor(2, 1, 64, 3), tensor(2, 1, dtype=torch.int32)
    arguments = (q, gates, *pools(4), table, *pools(64), table, *pools(576), table[:, 0], positions, SPEC)
    with recording(90) as launches:
        for name, _, params in bench_decode.candidates(decode.default_params(q, q, 4096, Card("sm90", 132))):
            launches.clear()
            decode.nsa(*arguments, params)
            assert all(options["OVERLAP"] == params.overlap for *_, options in launches)
            early = [options.get("launch_pdl", False) for *_, options in launches]
            assert early == [False, params.overlap, params.overlap]
            for kernel, launch in (("interval_kernel", params.cmp), ("blocks_kernel", params.blocks)):
                options = launched(launches, kernel)
                assert (options["num_warps"], options["num_stages"]) == (launch.num_warps, launch.num_stages)
            assert launched(launches, "interval_kernel")["BJ"] * 4 == params.cmp.columns
            options = launched(launches, "blocks_kernel")
            assert options["BN"] == params.blocks.columns
            at_once = params.blocks.depth * 32 * params.blocks.num_warps // 16
            assert options["TILES"] * options["BJ"] == min(1024, at_once), name


def test_every_candidate_of_msa_decoding_is_launched():
    def tensor(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, index_q, table = tensor(2, 1, 64, 128), tensor(2, 1, 4, 128), tensor(2, 512, dtype=torch.int32)
    pools = tensor(9, 128, 4, 128), tensor(9, 128, 4, 128), tensor(9, 128, 1, 128)
    arguments = (q, index_q, *pools, table, tensor(2, 1, dtype=torch.int32), bench_msa_decode.SPEC)
    with recording(90) as launches:
        default = msa_decode.default_params(q, index_q, pools[1], 65536, Card("sm90", 132))
        for text, params in bench_msa_decode.candidates(default):
            launches.clear()
            msa_decode.msa(*arguments, params)
            early = [options.get("launch_pdl", False) for *_, options in launches]
            assert early == [False, params.overlap, params.overlap]
            for kernel, keys, launch in (
                ("index_scores_kernel", "KEYS", params.cmp),
                ("chosen_kernel", "BN", params.blocks),
            ):
                options = launched(launches, kernel)
                assert (options["num_warps"], options["num_stages"]) == (launch.num_warps, launch.num_stages)
                assert options[keys] == launch.columns, text


def test_a_wrong_candidate_is_not_timed(monkeypatch):
    monkeypatch.setattr(tune, "median_ms", lambda function, rep: 1.0)
    run = {"good": 1.0, "default": 1.0, "bad": 1.1}
    case = tune.Case("x", lambda p: (torch.tensor([run[p]]),), ["good", "bad", "missing"], "default")
    exact = tune.Case("x", case.run, case.candidates, "default", lambda: (torch.tensor([1.0]),))
    rows = tune.sweep(case, exact, 1, float("inf"))
    assert [text.split()[0] for _, text in rows] == ["checked", "good", "WRONG", "KeyError"]
    assert [ms for ms, _ in rows] == [1.0, 1.0, float("inf"), float("inf")]
    assert tune.sweep(case, exact, 1, 0.0) == []
