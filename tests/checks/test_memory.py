"""`nsa memory`: estimates against the peaks that were measured, and what a user reads from them."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from nsa.checks import memory_trace
from nsa.checks.memory_estimate import (
    CARDS,
    GIB,
    GRANULARITIES,
    Card,
    Planner,
    estimate,
    find_card,
)
from nsa.checks.memory_trace import trace
from nsa.cli.main import app
from nsa.config import Config, load_config
from nsa.config.schema import DataConfig, ParallelConfig, TrainConfig
from nsa.errors import ConfigError
from nsa.nn.cache import KVCache
from nsa.nn.model import build_model

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PRODUCTION, BASE = "m7c_125m_1xa100_production", "m7c_125m"
STEP_TOKENS = 32_768  # of every recorded run of the trainer
SMALL = ["model.dim=64", "model.n_heads=4", "model.head_dim_k=16", "model.head_dim_v=16", "model.mlp_dim=128"]


@pytest.fixture(scope="module")
def traces():
    return {}


@pytest.fixture(autouse=True)
def _each_pass_is_traced_once(monkeypatch, traces):
    """Many tests ask for the same pass: it is traced with what it depends on, and everything else at its default."""

    def shared(config, param_dtype):
        size = config.train.micro_batch
        reduced = Config(
            model=config.model,
            nsa=config.nsa,
            msa=config.msa.model_copy(update={"warmup_steps": 0}),
            data=DataConfig(isolate_documents=config.data.isolate_documents),
            train=TrainConfig(seq_len=config.train.seq_len, micro_batch=size, batch_size=size),
            parallel=ParallelConfig(context=config.parallel.context),
            runtime=config.runtime.model_copy(update={"compile": False}),
        )
        key = reduced.model_dump_json(), memory_trace.TRACED_BLOCKS, param_dtype, memory_trace.NORMS_IN_FLOAT32
        if key not in traces:
            traces[key] = trace(reduced, param_dtype)
        return traces[key]

    monkeypatch.setattr("nsa.checks.memory_estimate.trace", shared)


def config_of(name, *overrides):
    return load_config(ROOT / "configs" / f"{name}.yaml", list(overrides))


def under_torch(version):
    """Norms as that version of PyTorch computes them."""
    in_float32 = tuple(map(int, version.split(".")[:2])) >= (2, 12)
    return patch.object(memory_trace, "NORMS_IN_FLOAT32", in_float32)


@cache
def estimate_of(name, overrides, torch_version):
    with under_torch(torch_version):
        return estimate(config_of(name, *overrides))


@dataclass(frozen=True)
class Point:
    """A measured peak, and the configuration that was recorded with it. A compiled one must lie in the range that is
    stated for it, another one within 1 % of the estimate."""

    name: str
    file: str
    overrides: tuple[str, ...]
    torch: str
    measured: float

    def is_met(self, *changes):
        overrides = (*self.overrides, *changes)
        found = estimate_of(self.file, overrides, self.torch)
        if config_of(self.file, *overrides).runtime.compile:
            low, high = found.compiled_gib
            return low <= self.measured <= high
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


_RECORDED = (*trainer_points(), *readiness_points(), *benchmark_points(), *compiled_points())
POINTS = {point.name: point for point in _RECORDED}
# One point of each kind, and a setting with which the estimate must miss it.
CHOSEN = {
    "bench-2048-eager-none": "train.seq_len=2112",
    "train-dense-dense-8192-none": "model.attention=nsa",
    "recomputation-none": "train.seq_len=2304",
    "ready": "runtime.gradient_checkpointing=block",
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_measured_peak_is_met_and_missed_with_another_setting(name):
    assert POINTS[name].is_met()
    assert not POINTS[name].is_met(CHOSEN[name])


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in POINTS if name not in CHOSEN])
def test_every_other_measured_peak_is_met_and_missed_with_more_layers(name):
    assert POINTS[name].is_met()
    assert not POINTS[name].is_met("model.n_layers=20")


def test_compiling_saves_nothing_of_the_logits():
    small = estimate(config_of(BASE, "model.vocab_size=256"))
    few = ("model.n_layers=1", "train.batch_size=4")
    large = estimate(config_of(BASE, *few, "model.vocab_size=150000", "runtime.compile=true"))
    assert large.moment == "head's backward"
    assert large.compiled_gib[0] > (large.parts["logits"] + 3 * large.parts["weights"]) / GIB
    assert small.compiled_gib[0] < small.parts["activations"] / GIB


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
    [pytest.param(*case, marks=[] if case in {("none", 16), ("block", 1)} else pytest.mark.long) for case in SHORTENED],
)
def test_three_traced_blocks_stand_for_all(checkpointing, micro_batch, monkeypatch):
    config = config_of(
        BASE, "model.n_layers=5", f"train.micro_batch={micro_batch}", f"runtime.gradient_checkpointing={checkpointing}"
    )
    short = estimate(config)
    monkeypatch.setattr(memory_trace, "TRACED_BLOCKS", 5)
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


def test_other_micro_batches_are_interpolated_from_two_traces():
    settings = ("model.n_layers=1", "train.batch_size=32")
    planner = Planner(config_of(PRODUCTION, *settings, "train.micro_batch=2"))
    for micro_batch in (1, 16):
        direct = estimate(config_of(PRODUCTION, *settings, f"train.micro_batch={micro_batch}"))
        assert planner.estimate(micro_batch).peak_gib == pytest.approx(direct.peak_gib, rel=0.02)


@pytest.mark.parametrize(
    ("configured", "sizes"), [(1, (2, 5)), pytest.param(4, (2, 3, 5), marks=pytest.mark.long)], ids=["short", "long"]
)
def test_other_micro_batches_are_interpolated_on_their_side_of_the_limit_of_long_passes(configured, sizes):
    """Three sequences of 65,536 tokens are a short pass, four and five a long one, with parts of selected attention in
    two stretches."""
    settings = [*SMALL, "model.n_layers=1", "train.batch_size=60"]
    planner = Planner(config_of("long_64k", *settings, f"train.micro_batch={configured}"))
    for micro_batch in sizes:
        direct = estimate(config_of("long_64k", *settings, f"train.micro_batch={micro_batch}"))
        assert planner.estimate(micro_batch).peak_gib == pytest.approx(direct.peak_gib, rel=0.03)


@pytest.mark.parametrize(
    ("settings", "nproc", "border"),
    [
        (["train.seq_len=8192", "model.vocab_size=128256"], 1, 3),  # whose logits are more than 2^31
        (["train.seq_len=262144", "parallel.context=8", "parallel.strategy=ddp"], 8, 8),  # 32,768 tokens a rank
        (["train.seq_len=262144", "data.isolate_documents=false"], 1, 2),  # cuDNN takes one
    ],
    ids=["logits", "shared sequences", "one sequence"],
)
def test_traces_lie_on_the_side_of_the_border_where_the_micro_batch_lies(settings, nproc, border):
    planner = Planner(config_of(BASE, *settings, "train.batch_size=4", "train.micro_batch=4"), nproc)
    for size in (1, border - 1, border, 4 * border):
        assert {traced >= border for traced in planner._traced_sizes(size)} == {size >= border}


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
    config = config_of(PRODUCTION, "parallel.strategy=fsdp", "runtime.compile=false")
    with under_torch("2.12.1"):
        newer = estimate(config)
    with under_torch("2.11.0+cu130"):
        assert newer.peak_gib > estimate(config).peak_gib


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


def test_memory_that_is_not_counted_is_named():
    assert Planner(config_of(BASE, *SMALL)).not_counted == []
    teacher, graphs = Planner(
        config_of(BASE, *SMALL, "train.teacher=runs/dense", "runtime.cuda_graphs=true")
    ).not_counted
    assert teacher.startswith("train.teacher")
    assert graphs.startswith("runtime.cuda_graphs")


def test_frozen_parameters_have_no_gradients_and_no_moments():
    whole, frozen = (Planner(config_of(BASE, *SMALL, *more)) for more in ([], ['train.freeze=["*", "!*.attention.*"]']))
    share = frozen._trainable / whole._trainable
    assert 0.1 < share < 0.9
    for part in ("gradients", "optimizer"):
        assert frozen.estimate().parts[part] == pytest.approx(share * whole.estimate().parts[part])
    assert frozen.estimate().parts["weights"] == whole.estimate().parts["weights"]


def test_cards_by_name_and_by_size():
    assert find_card("A100-80GB").gib == CARDS["a100-80gb"]
    assert find_card("40").gib == find_card("40 GiB".replace(" ", "")).gib == 40.0
    for text in ("a101", "0", "-3", "nan", "inf", ""):
        with pytest.raises(ConfigError, match="--card"):
            find_card(text)


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


COMMAND = ["memory", str(ROOT / "configs" / f"{BASE}.yaml"), "model.n_layers=2", "--nproc", "2"]


@pytest.fixture
def nsa_memory(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("nsa.checks.memory_estimate.present_card", lambda: None)

    def run(*arguments):
        app([*COMMAND, *arguments], standalone_mode=False)
        return capsys.readouterr().out

    return run


def test_the_command_prints_three_tables_in_80_columns(nsa_memory):
    printed = nsa_memory()
    assert max(map(len, printed.replace(str(ROOT), "").splitlines())) <= 80
    for words in ("optimizer state", "DDP buckets", "peak", "none (configured)", "a100-40gb", "Reserved: 1 GiB"):
        assert words in printed


@pytest.mark.long
def test_the_command_runs_as_a_process_without_a_gpu_and_prints_no_warning():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "nsa", *COMMAND]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert "a100-40gb" in done.stdout


def test_the_command_advises_what_to_change_when_it_does_not_fit(nsa_memory):
    needed = json.loads(nsa_memory("--json", "--card", "h200"))["estimate"]["needed_gib"]
    printed = nsa_memory("--card", f"{needed - 0.01:.3f}")
    assert "TOO LARGE" in printed
    assert "DOES NOT FIT" in printed
    assert "runtime.gradient_checkpointing=block" in printed
    assert "Cards are compared with" not in printed


def test_the_command_shows_the_range_with_compile_and_plans_with_its_upper_end(nsa_memory):
    found = json.loads(nsa_memory("--json", "--card", "h200", "--override", "runtime.compile=true"))
    low, high = found["estimate"]["compiled_gib"]
    assert low < high == found["estimate"]["planned_gib"] < found["estimate"]["peak_gib"]
    assert found["compiled"]["branch"] is None
    printed = nsa_memory("--card", "h200", "--override", "runtime.compile=true")
    assert f"{low:.2f} to {high:.2f}" in printed
    assert "not measured" in printed
    assert "Cards are compared with the upper end" in printed


def test_the_command_prints_json_and_rejects_bad_input(nsa_memory):
    found = json.loads(nsa_memory("--json", "--card", "h200"))
    assert found["schema"] == 1
    assert set(found["checkpointing"]) == set(GRANULARITIES)
    assert found["estimate"]["peak_gib"] == found["checkpointing"]["none"]
    assert found["estimate"]["peak_gib"] * GIB == pytest.approx(
        sum(found["estimate"][part] for part in estimate(config_of(BASE)).parts), rel=1e-6
    )
    assert found["cards"][0]["fits"]
    assert found["cards"][0]["left_gib"] > 100
    with pytest.raises(ConfigError, match="--card") as refused:
        nsa_memory("--card", "a101")
    assert refused.value.exit_code == 2


def test_the_cache_is_predicted_to_the_byte(nsa_memory):
    """A real cache of three sequences is larger than one of two by what was predicted for a sequence."""
    small = [*SMALL, "model.n_layers=3", "model.layer_pattern=[nsa,dense,window]", "runtime.precision=fp32"]
    config = config_of(BASE, *small)
    predicted = Planner(config).estimate_cache(1000)
    model = build_model(config, 256, seed=0)
    two, three = (KVCache(model, sequences=n, max_length=1000).memory() for n in (2, 3))
    assert predicted.parts == {part: three[part] - two[part] for part in two}
    assert predicted.weights == sum(p.nbytes for p in model.parameters())
    assert predicted.most_sequences(Card("none", 0.5)) == 0
    printed = nsa_memory("--cache", "32768", "--card", "24gb")
    found = json.loads(nsa_memory("--cache", "32768", "--card", "24gb", "--json"))["cache"]
    assert found["parts"]["sel"] == 2 * 32768 * 2 * (64 + 64) * 2  # layers, tokens, heads, channels, bytes
    assert f"one sequence {sum(found['parts'].values()) / 2**20:.2f}" in " ".join(printed.split())
    assert f"24gb: {found['most_sequences']['24gb']} sequences of this length fit" in printed
    for refused in ("0", "2147483648", "1" + 20 * "0"):
        with pytest.raises(ConfigError, match="--cache: must be from 1 to 2147483647 tokens, got"):
            nsa_memory("--cache", refused)
    longest = Planner(config).estimate_cache(2**31 - 1).parts
    assert longest["sel"] == predicted.parts["sel"] // 1024 * 2**31
    assert longest["win"] == predicted.parts["win"]
