"""`nsa memory`: estimates against the peaks that were measured, and against each other."""

import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from nsa.checks import memory_trace
from nsa.checks.memory_estimate import GIB, GRANULARITIES, Card, Planner, estimate, find_card
from nsa.checks.memory_trace import muon_bytes
from nsa.checks.memory_workspaces import BLAS_BYTES
from nsa.config import load_config
from nsa.errors import ConfigError
from nsa.nn.loss import logits_at_once
from tests.checks.memory import BASE, PRODUCTION, ROOT, SMALL, config_of, traced_once, under_torch

RESULTS = ROOT / "bench" / "results"


@pytest.fixture(scope="module", autouse=True)
def _each_pass_is_traced_once():
    with patch("nsa.checks.memory_estimate.trace", traced_once):
        yield


@cache
def estimate_of(name, overrides, torch_version):
    with under_torch(torch_version):
        return estimate(config_of(name, *overrides))


@dataclass(frozen=True)
class Point:
    """A measured peak, and the configuration that was recorded with it. A compiled one must lie in the range that is
    stated for it, another one within 1 % of the estimate. All were measured when the loss was not compiled: it had 8
    bytes more for each logit."""

    name: str
    file: str
    overrides: tuple[str, ...]
    torch: str
    measured: float

    def is_met(self, *changes):
        if self.name in ("tensorwise", "rowwise"):
            pytest.importorskip("torchao", reason="torchao, of the extra float8, is not installed")
        overrides = (*self.overrides, *changes)
        found = estimate_of(self.file, overrides, self.torch)
        config = config_of(self.file, *overrides)
        if config.runtime.compile:
            low, high = found.compiled_gib
            of_loss = 8 * logits_at_once(found.micro_batch * config.train.seq_len, 256) / GIB
            return low <= self.measured - (of_loss if found.moment == "head's backward" else 0.0) <= high
        return found.peak_gib == pytest.approx(self.measured, rel=0.01)


def trainer_points():
    recorded = json.loads((RESULTS / "trainer-h200.json").read_text())
    for granularity, values in recorded["recomputation"]["runs"].items():
        overrides = ("runtime.compile=true", f"runtime.gradient_checkpointing={granularity}")
        name = f"recomputation-{granularity}"
        yield Point(name, PRODUCTION, overrides, recorded["machine"]["torch"], values["peak_gib"])


def readiness_points():
    recorded = json.loads((ROOT / "docs" / "readiness-h200" / "readiness.json").read_text())
    (measured,) = {c["measured"] for c in recorded["criteria"] if c["name"] == "memory per GPU"}
    overrides = tuple(o for o in recorded["overrides"] if not o.startswith("data."))
    yield Point("ready", Path(recorded["config_file"]).stem, overrides, "2.11", float(measured.split()[0]))


def benchmark_points():
    """The results of bench/train.py in train-h200.json, without document boundaries, that are of the present model."""
    for run in json.loads((RESULTS / "train-h200.json").read_text())["runs"]:
        for result in run["results"]:
            checkpointing = result["gradient_checkpointing"]
            if not run["joined_projections"] or result["attention"] != "nsa":
                continue
            compiled = result["compiled"] and (checkpointing == "none" or run["compiles_checkpointed_blocks"])
            overrides = (
                f"train.seq_len={result['seq_len']}",
                f"train.batch_size={result['batch_size']}",
                f"runtime.gradient_checkpointing={checkpointing}",
                f"runtime.compile={str(compiled).lower()}",
                "data.isolate_documents=false",
            )
            name = f"bench-{result['seq_len']}-{'compile' if result['compiled'] else 'eager'}-{checkpointing}"
            yield Point(name, BASE, overrides, run["machine"]["torch"], result["peak_gib"])


def compiled_points():
    """The compiled results of the model with joined projections: of bench/train.py without and with document
    boundaries, and of bench/long.py. Dense attention in the first file had one product for queries, keys and values."""
    for file, config in (("dense-packed-h200", BASE), ("train-dense-h200", BASE), ("long-h200", "m7c_125m_1m")):
        recorded = json.loads((RESULTS / f"{file}.json").read_text())
        for result in recorded["results"]:
            attention, length, packed = result.get("attention", "nsa"), result["seq_len"], result.get("packed", False)
            granularity = result["gradient_checkpointing"]
            if not result["compiled"] or (file == "dense-packed-h200" and attention == "dense"):
                continue
            overrides = (
                f"model.attention={attention}",
                f"train.seq_len={length}",
                f"train.batch_size={result.get('batch_size', 1)}",
                f"runtime.gradient_checkpointing={granularity}",
                "runtime.compile=true",
                f"data.isolate_documents={str(packed).lower()}",
            )
            name = f"{file.removesuffix('-h200')}-{attention}-{length}-{granularity}{'-packed' * packed}"
            yield Point(name, config, overrides, recorded["machine"]["torch"], result["peak_gib"])


def float8_points():
    recorded = json.loads((RESULTS / "train-1b-float8-h200.json").read_text())
    for result in recorded["results"]:
        if (recipe := result["float8"]) != "none":
            overrides = (
                f"train.seq_len={result['seq_len']}",
                f"train.batch_size={result['batch_size']}",
                f"train.micro_batch={result['batch_size']}",
                f"runtime.gradient_checkpointing={result['gradient_checkpointing']}",
                f"runtime.float8={recipe}",
                "runtime.compile=true",
                "parallel.strategy=single",
                "data.isolate_documents=false",
            )
            yield Point(recipe, recorded["config"], overrides, recorded["machine"]["torch"], result["peak_gib"])


_RECORDED = (*trainer_points(), *readiness_points(), *benchmark_points(), *compiled_points(), *float8_points())
POINTS = {point.name: point for point in _RECORDED}
# One point of each kind, and a setting with which the estimate must miss it.
CHOSEN = {
    "bench-2048-eager-none": "train.seq_len=2112",
    "train-dense-dense-8192-none": "model.attention=nsa",
    "tensorwise": "runtime.float8=none",
    "recomputation-none": "train.seq_len=2304",
    "ready": "runtime.gradient_checkpointing=block",
}


@pytest.mark.parametrize(
    "name", [*list(CHOSEN)[:3], *(pytest.param(name, marks=pytest.mark.long) for name in list(CHOSEN)[3:])]
)
def test_a_measured_peak_is_met_and_missed_with_another_setting(name):
    assert POINTS[name].is_met()
    assert not POINTS[name].is_met(CHOSEN[name])


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in POINTS if name not in CHOSEN])
def test_every_other_measured_peak_is_met_and_missed_with_more_layers(name):
    assert POINTS[name].is_met()
    assert not POINTS[name].is_met("model.n_layers=20")


@pytest.mark.parametrize(("precision", "compiled_bytes"), [("bf16", 4), ("fp32", 8)])
def test_a_compiled_loss_has_the_logits_and_their_gradient_in_the_dtype_of_the_products(precision, compiled_bytes):
    few = ("model.n_layers=1", "train.batch_size=4", "model.vocab_size=150000", f"runtime.precision={precision}")
    config = config_of(BASE, *few, "runtime.compile=true")
    found, logits = estimate(config), 4 * config.train.seq_len * 150_000
    assert found.moment == "head's backward"
    assert found.parts["logits"] == pytest.approx(12 * logits, rel=0.05)
    saved = (12 - compiled_bytes) * logits / GIB
    assert found.peak_gib - found.compiled_gib[1] == pytest.approx(saved, rel=0.03)


def test_a_compiled_configuration_is_planned_with_the_upper_end_of_the_range_where_there_is_one():
    compiled, eager = Planner(config_of(BASE, "runtime.compile=true")), Planner(config_of(BASE))
    for granularity in GRANULARITIES:
        found, same = compiled.estimate(checkpointing=granularity), eager.estimate(checkpointing=granularity)
        assert (found.peak_gib, found.compiled_gib) == (same.peak_gib, same.compiled_gib)
        assert same.planned_gib == same.peak_gib
        assert found.planned_gib == (found.compiled_gib[1] if granularity != "branch" else found.peak_gib)


SHORTENED = [(g, m) for g in GRANULARITIES for m in (1, 16)]


@pytest.mark.parametrize(
    ("checkpointing", "micro_batch"),
    [pytest.param(*case, marks=[] if case == ("block", 1) else pytest.mark.long) for case in SHORTENED],
)
def test_three_traced_blocks_stand_for_all(checkpointing, micro_batch, monkeypatch):
    config = config_of(
        BASE, "model.n_layers=4", f"train.micro_batch={micro_batch}", f"runtime.gradient_checkpointing={checkpointing}"
    )
    short = estimate(config)
    monkeypatch.setattr(memory_trace, "TRACED_BLOCKS", 4)
    whole = estimate(config)
    assert short.peak_gib == pytest.approx(whole.peak_gib, rel=1e-3)
    for part in ("weights", "optimizer"):
        assert short.parts[part] == whole.parts[part]


def test_a_pattern_needs_what_its_layers_need():
    def peak(pattern):
        return estimate(config_of(BASE, *SMALL, "model.n_layers=6", f"model.layer_pattern={pattern}")).peak_gib

    sparse, dense, mixed = peak("[nsa]"), peak("[dense]"), peak("[nsa,dense]")
    assert dense < mixed < sparse
    assert mixed == pytest.approx((sparse + dense) / 2, rel=0.03)


def test_another_micro_batch_needs_what_a_configuration_with_it_needs():
    settings = ("model.n_layers=1", "train.batch_size=32")
    planner = Planner(config_of(PRODUCTION, *settings, "train.micro_batch=2"))
    for micro_batch in (1, 16):
        direct = estimate(config_of(PRODUCTION, *settings, f"train.micro_batch={micro_batch}"))
        assert planner.estimate(micro_batch) == direct


def test_nothing_of_the_model_is_allocated():
    process = psutil.Process()
    estimate(config_of(BASE, *SMALL))  # what is imported and cached stays
    before = process.memory_info().rss
    found = estimate(config_of("llama_1b", "train.seq_len=4096"), nproc=8)  # a pass that no other test traces
    assert found.parts["weights"] * 8 > 3 * 2**30
    assert process.memory_info().rss - before < 300 * 2**20


def test_ddp_adds_its_buckets_and_fsdp_shares_the_state():
    size = ("train.batch_size=16", "train.micro_batch=2")
    single = estimate(config_of(PRODUCTION, "train.batch_size=2", "train.micro_batch=2"))
    ddp = estimate(config_of(PRODUCTION, *size, "parallel.strategy=ddp"), nproc=8)
    fsdp = estimate(config_of(PRODUCTION, *size, "parallel.strategy=fsdp"), nproc=8)
    for part in ("weights", "optimizer"):
        assert single.parts[part] == ddp.parts[part] == 8 * fsdp.parts[part]
    assert ddp.parts["strategy"] == ddp.all_gradients == single.parts["weights"]
    assert ddp.parts["gradients"] == 0  # views of the buckets
    assert fsdp.peak_gib < single.peak_gib < ddp.peak_gib


def test_gradients_live_through_every_pass_that_accumulates():
    whole = config_of(BASE, "train.micro_batch=4", "train.batch_size=4")
    parts = config_of(BASE, "train.micro_batch=4", "train.batch_size=8")
    found = estimate(parts)
    assert found.parts["gradients"] == found.all_gradients > 10 * estimate(whole).parts["gradients"]


def test_a_frozen_branch_has_no_gradients_and_no_optimizer_state():
    found = estimate(config_of(BASE, *SMALL, "nsa.force_branch=win"))
    assert found.parts["optimizer"] < 2 * found.parts["weights"]
    assert found.all_gradients == found.parts["optimizer"] / 2


def test_norms_of_sharded_models_need_more_since_torch_2_12():
    config = config_of(PRODUCTION, *SMALL, "parallel.strategy=fsdp", "runtime.compile=false")
    with under_torch("2.12.1"):
        newer = estimate(config)
    with under_torch("2.11.0+cu130"):
        assert newer.peak_gib > estimate(config).peak_gib


def test_casts_to_fp8_are_counted_without_torch_compile():
    """The peak is in the backward of the MLP's last layer, which casts its input for the gradient of its weight: it
    holds the gradient of the output in bf16 with two casts, that of the input in bf16, and two float32 copies and the
    cast of the input."""
    pytest.importorskip("torchao", reason="torchao, of the extra float8, is not installed")
    planner = Planner(config_of(BASE, "model.attention=dense", "runtime.float8=tensorwise", "runtime.compile=true"))
    found, recomputed = planner.estimate(), planner.estimate(checkpointing="block")
    tokens, hidden, dim = 16 * 2048, 2048, 768
    by_hand = tokens * (hidden * (2 + 4 + 4 + 1) + dim * (2 + 1 + 1))
    assert found.parts["temporaries"] == pytest.approx(by_hand, rel=0.01)  # and weights in FP8
    assert found.compiled_gib[1] == found.planned_gib < found.peak_gib
    assert (recomputed.compiled_gib, recomputed.planned_gib) == (None, recomputed.peak_gib)


def test_an_estimate_in_fp8_needs_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"runtime\.float8: rowwise needs the package torchao.*\[float8\]"):
        estimate(config_of(BASE, *SMALL, "runtime.float8=rowwise"))


# Two blocks of seven matrices of 256 x 256.
SQUARES = ["model.attention=dense", "model.dim=256", "model.n_heads=4", "model.n_kv_heads=4", "model.mlp_dim=256"]
SQUARES += ["model.head_dim_k=64", "model.head_dim_v=64", "model.n_layers=2", "model.vocab_size=256"]
SQUARES += ["train.seq_len=64", "train.batch_size=1", "train.optimizer=muon"]


def test_the_step_of_muon_is_the_peak_of_a_short_pass():
    """For the last product of an iteration five bf16 tensors are as large as the matrices: their copy, the factor
    before and after, its Gram matrix and the polynomial of it."""
    found, adamw = (estimate(config_of(BASE, *SQUARES, *more)) for more in ([], ["train.optimizer=adamw"]))
    matrices = 14 * 256 * 256
    assert found.moment == "optimizer step"
    assert found.parts["workspaces"] - BLAS_BYTES == 5 * 2 * matrices
    assert found.parts["gradients"] == found.all_gradients == found.parts["weights"]
    assert found.parts["optimizer"] == 2 * found.all_gradients - 4 * matrices
    assert found.parts["activations"] == found.parts["temporaries"] == 0
    assert found.compiled_gib == (found.peak_gib, found.peak_gib), "compiled blocks do not change the step"
    assert adamw.moment != "optimizer step"


def test_the_step_of_muon_under_fsdp_holds_messages_of_shards_and_no_buffers_of_fsdp():
    planner = Planner(config_of(BASE, *SQUARES, "train.batch_size=2", "parallel.strategy=fsdp"), 2)
    own = 14 * 256 * 256 // 2  # elements that a rank orthogonalizes, and elements of its shards of all matrices
    for accumulates in (False, True):
        step = planner._step_parts(accumulates)
        assert step["workspaces"] - BLAS_BYTES == 6 * 2 * own, "the sent and the received shards instead of one copy"
        assert step["gradients"] == step["weights"] == 4 * planner._parameters / 2
        assert step["strategy"] == 0


def test_muon_orthogonalizes_in_rounds_of_limited_size(monkeypatch):
    planner = Planner(config_of(BASE, *SQUARES))
    monkeypatch.setattr(memory_trace, "MOST_ELEMENTS", 2 * 256 * 256)
    assert muon_bytes(planner._muon_matrices, 1) == 5 * 2 * 2 * 256 * 256


def test_muon_without_a_matrix_to_train_needs_nothing():
    found = Planner(config_of(BASE, *SQUARES, 'train.freeze=["blocks.*"]'))._step_parts(False)
    assert found["workspaces"] == BLAS_BYTES


FEW = ("quickstart", "m7c_125m", "llama_1b")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in FEW else pytest.mark.long)
        for path in sorted((ROOT / "configs").glob("*.yaml"))
    ],
)
def test_every_shipped_configuration_is_estimated(path):
    config = load_config(path)
    found = estimate(config, 8 if config.train.batch_size % 8 == 0 and config.parallel.strategy != "single" else 1)
    assert 0.1 < found.peak_gib < config.readiness.max_mem_gib


def test_the_file_for_a_million_tokens_fits_an_h200_and_recomputing_whole_blocks_a_card_of_80_gb():
    planner = Planner(config_of("m7c_125m_1m"))
    with under_torch("2.11"):
        found, recomputed = planner.estimate(), planner.estimate(checkpointing="block")
    assert found.needed_gib <= find_card("h200").gib
    assert recomputed.needed_gib <= find_card("h100").gib
    inputs_of_blocks = 4 * 2**20 * 768 * 12
    assert recomputed.parts["activations"] == pytest.approx(inputs_of_blocks, rel=0.06)


def test_the_file_for_a_24_gb_card_fits_one():
    assert estimate(config_of("m7c_125m_24g")).needed_gib <= find_card("24gb").gib


def test_the_largest_micro_batch_fits_and_one_more_does_not():
    planner = Planner(config_of(BASE, "train.batch_size=48", "train.micro_batch=16"))
    largest, usable = planner.fit(Card("any", 16.0))
    assert planner.estimate(largest).needed_gib <= 16.0 < planner.estimate(largest + 1).needed_gib
    assert 48 % usable == 0
    assert not any(48 % n == 0 for n in range(usable + 1, largest + 1))
    assert planner.fit(Card("any", 1.5)) == (0, 0)
    assert max(size for _, size in planner._traces) <= 8 * largest, "no pass far larger than the card is traced"


def test_advice_names_settings_with_which_it_fits():
    card = Card("any", 11.0)
    planner = Planner(config_of(BASE))
    lines = planner.advice(card)
    assert len(lines) == 4
    for line in lines:
        assert Planner(config_of(BASE, line.split(" ")[0])).estimate().needed_gib <= card.gib
    assert planner.advice(Card("any", 80.0)) == []
    (line,) = planner.advice(Card("any", 1.5))
    assert "shorter train.seq_len" in line


def test_advice_names_no_setting_that_is_refused():
    """Where ranks share sequences, compiled blocks are recomputed whole or not at all."""
    shared = ["parallel.context=2", "parallel.strategy=fsdp", "runtime.compile=true"]
    planner = Planner(config_of(BASE, *SMALL, *shared), 2)
    needed = [planner.estimate(None, kept).needed_gib for kept in ("none", "block")]
    lines = planner.advice(Card("any", sum(needed) / 2))
    assert any("gradient_checkpointing=block" in line for line in lines)
    for line in lines:
        config_of(BASE, *SMALL, *shared, line.split(" ")[0])
    static = ["parallel.strategy=ddp", "parallel.ddp.static_graph=true"]  # a step is one pass
    planner = Planner(config_of(BASE, *SMALL, *static), 2)
    assert not any("micro_batch" in line for line in planner.advice(Card("any", planner.estimate(1).needed_gib)))
    (line,) = planner.advice(Card("any", 0.9 * planner.estimate(1, "block").needed_gib))
    assert line.startswith("a larger card")


def test_memory_that_is_not_counted_is_named():
    assert Planner(config_of(BASE, *SMALL)).not_counted == []
    teacher, graphs, freeze = Planner(
        config_of(BASE, *SMALL, "train.teacher=runs/dense", "runtime.cuda_graphs=true", "train.freeze=[head.*]")
    ).not_counted
    assert "train.freeze" in freeze
    assert teacher.startswith("train.teacher")
    assert graphs.startswith("runtime.cuda_graphs")


def test_frozen_parameters_have_no_gradients_and_no_moments():
    whole, frozen = (Planner(config_of(BASE, *SMALL, *more)) for more in ([], ['train.freeze=["*", "!*.attention.*"]']))
    share = frozen._trainable / whole._trainable
    assert 0.1 < share < 0.9
    for part in ("gradients", "optimizer"):
        assert frozen.estimate().parts[part] == pytest.approx(share * whole.estimate().parts[part])
    assert frozen.estimate().parts["weights"] == whole.estimate().parts["weights"]


@pytest.mark.parametrize(
    ("nproc", "overrides", "named"),
    [
        (3, [], "train.batch_size"),
        (0, [], "--nproc"),
        (2, ["parallel.strategy=single"], "parallel.strategy"),
        (4, ["train.micro_batch=8"], "train.micro_batch"),
    ],
)
def test_configurations_that_cannot_run_are_refused_by_name(nproc, overrides, named):
    with pytest.raises(ConfigError, match=named):
        Planner(config_of(BASE, *overrides), nproc)
