"""The shipped configurations load and contain what they promise."""

from functools import reduce
from pathlib import Path

import pytest

from nsa.config import Config, load_config
from nsa.ops.spec import MSASpec
from nsa.train.state import micro_batch_size

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

REQUIRED = [
    "quickstart.yaml",
    "m7c_125m.yaml",
    "m7c_125m_1xa100_production.yaml",
    "m7c_125m_2xa100_production.yaml",
    "m7c_125m_2xa100_shake.yaml",
    "m7c_125m_2k_test.yaml",
    "m7c_125m_24g.yaml",
    "m7c_125m_hybrid.yaml",
    "m7c_125m_muon.yaml",
    "long_64k.yaml",
    "long_256k.yaml",
    "m7c_125m_1m.yaml",
    "llama_1b.yaml",
    "msa_125m.yaml",
    "msa_125m_1m.yaml",
    "msa_1b.yaml",
    "convert_msa.yaml",
    "finetune.yaml",
]

M7C_125M = {
    "model.dim": 768,
    "model.n_layers": 12,
    "model.n_heads": 12,
    "model.n_kv_heads": 2,
    "model.head_dim_k": 64,
    "model.head_dim_v": 64,
    "model.attention": "nsa",
    "nsa.cmp_block": 32,
    "nsa.cmp_stride": 16,
    "nsa.sel_block": 64,
    "nsa.num_selected": 16,
    "nsa.window": 512,
    "nsa.phi": "mean",
    "data.source": "fineweb_edu",
    "data.tokenizer": "bytes",
    "train.steps": 50_000,
    "train.seq_len": 2048,
    "train.lr": 2e-4,
    "train.warmup_steps": 2000,
    "train.schedule": "cosine",
    "train.weight_decay": 0.01,
    "train.grad_clip": 1.0,
    "runtime.precision": "bf16",
}

# Files that train the 125M model itself, only on other machines: whoever moves between them keeps the run.
SAME_MODEL = ["m7c_125m_1xa100_production.yaml", "m7c_125m_2xa100_production.yaml", "m7c_125m_24g.yaml"]


def shipped(name: str) -> Config:
    return load_config(CONFIGS / name)


def value_of(config: Config, key: str) -> object:
    return reduce(getattr, key.split("."), config)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_loads(path):
    assert isinstance(load_config(path), Config)


@pytest.mark.parametrize("name", REQUIRED)
def test_every_required_file_exists_and_starts_with_a_comment(name):
    first_line = (CONFIGS / name).read_text(encoding="utf-8").splitlines()[0]
    assert first_line.startswith("# ")


@pytest.mark.parametrize("key", M7C_125M)
def test_the_125m_configuration_has_the_required_values(key):
    value = value_of(shipped("m7c_125m.yaml"), key)
    assert value == M7C_125M[key]
    assert type(value) is type(M7C_125M[key])


@pytest.mark.parametrize("name", SAME_MODEL)
def test_variants_for_other_machines_train_the_same_model_on_the_same_tokens(name):
    base, variant = shipped("m7c_125m.yaml"), shipped(name)
    assert variant.model == base.model
    assert variant.nsa == base.nsa
    assert variant.data == base.data
    assert variant.train.model_copy(update={"micro_batch": base.train.micro_batch}) == base.train


def test_the_one_gpu_production_file_recomputes_and_promises_less_than_30_gib():
    config = shipped("m7c_125m_1xa100_production.yaml")
    assert config.runtime.gradient_checkpointing == "selective"
    assert config.runtime.compile
    assert config.readiness.max_mem_gib == 30
    assert config.readiness.min_toks_per_s == 100_000
    assert config.parallel.strategy == "single"


@pytest.mark.parametrize("name", ["m7c_125m_2xa100_production.yaml", "m7c_125m_2xa100_shake.yaml"])
def test_two_gpu_files_leave_the_strategy_to_the_launcher_and_run_on_more_ranks_too(name):
    config = shipped(name)
    assert config.parallel.strategy == "auto"
    assert [micro_batch_size(config, ranks) for ranks in (1, 2, 4, 8)] == [16, 8, 4, 2]


def test_the_shake_run_has_500_steps_and_reaches_every_rare_event_within_them():
    config = shipped("m7c_125m_2xa100_shake.yaml")
    assert config.train.steps == 500
    assert 0 < config.train.warmup_steps < 500
    assert 0 < config.train.eval_every < 500
    assert 0 < config.checkpoint.every < 500
    assert 0 < config.telemetry.mem_dump_every < 500


def test_the_quick_check_is_small_needs_no_download_and_really_selects():
    config, production = shipped("m7c_125m_2k_test.yaml"), shipped("m7c_125m.yaml")
    assert config.data.source == "synthetic"
    assert config.train.seq_len == 2048
    assert config.model.n_layers < production.model.n_layers
    assert config.train.steps <= 50
    assert config.runtime.device == "auto"
    assert config.nsa == production.nsa
    assert config.train.seq_len // config.nsa.sel_block > config.nsa.num_selected


def test_the_24_gb_file_promises_to_stay_below_the_card():
    config = shipped("m7c_125m_24g.yaml")
    assert config.readiness.max_mem_gib < 24
    assert config.runtime.gradient_checkpointing == "block"
    assert config.train.micro_batch < config.train.batch_size


def test_the_long_file_trains_on_65536_tokens():
    config = shipped("long_64k.yaml")
    assert config.train.seq_len == 65_536
    assert config.runtime.gradient_checkpointing == "block"


@pytest.mark.parametrize(("name", "tokens"), [("long_256k.yaml", 262_144), ("m7c_125m_1m.yaml", 1_048_576)])
def test_longer_files_train_the_same_model_on_one_sequence_a_step(name, tokens):
    config, shorter = shipped(name), shipped("long_64k.yaml")
    assert (config.train.seq_len, micro_batch_size(config, 1)) == (tokens, 1)
    assert config.model.model_copy(update={"rope_base": shorter.model.rope_base}) == shorter.model
    assert (config.nsa, config.data) == (shorter.nsa, shorter.data)
    assert config.train.steps * tokens == shorter.train.steps * shorter.train.seq_len * shorter.train.batch_size


def test_the_1b_file_has_a_billion_parameters_and_shards_them():
    config = shipped("llama_1b.yaml")
    model = config.model
    queries_and_output = 2 * model.dim * model.n_heads * model.head_dim_k
    keys_and_values = 6 * model.dim * model.n_kv_heads * model.head_dim_k  # a pair for each branch
    mlp = 3 * model.dim * model.resolved_mlp_dim()
    assert 0.9e9 < model.n_layers * (queries_and_output + keys_and_values + mlp) < 1.4e9
    assert config.parallel.strategy == "fsdp"


def test_the_msa_files_have_the_published_selection_and_the_models_of_their_nsa_counterparts():
    own, other, long = shipped("msa_125m.yaml"), shipped("m7c_125m_hybrid.yaml"), shipped("msa_125m_1m.yaml")
    assert own.model.layer_kinds() == long.model.layer_kinds() == ["msa"] * 12
    assert own.msa.spec() == long.msa.spec() == MSASpec(block=128, num_selected=16, num_local=1, num_init=0)
    assert own.msa.index_dim == long.msa.index_dim == own.model.head_dim_k == 64
    same = {"attention": "msa", "layer_pattern": None}
    assert own.model == other.model.model_copy(update=same)
    assert (own.data, own.train) == (other.data, other.train)
    nsa = shipped("m7c_125m_1m.yaml")
    assert long.model == nsa.model.model_copy(update=same)
    assert (long.data, long.train, long.runtime) == (nsa.data, nsa.train, nsa.runtime)
    # The index that the long run starts from.
    assert long.data.tokenizer == own.data.tokenizer


def test_the_1b_file_of_msa_has_the_form_that_stock_engines_read():
    config = shipped("msa_1b.yaml")
    model = config.model
    heads = (model.n_heads, model.n_kv_heads, model.head_dim_k, model.head_dim_v, model.rotary_dim)
    assert heads == (32, 4, 128, 128, 64)
    assert (model.layer_kinds(), model.activation, model.qk_norm) == (["msa"] * 16, "swiglu_oai", True)
    assert (config.msa.block, config.msa.num_selected, config.msa.index_dim) == (128, 16, 128)
    attention = 2 * model.dim * (model.n_heads + model.n_kv_heads) * model.head_dim_k
    assert 0.9e9 < model.n_layers * (attention + 3 * model.dim * model.resolved_mlp_dim()) < 1.4e9
    assert config.parallel.strategy == "fsdp"


def test_the_first_stage_of_a_conversion_to_msa_warms_the_index_up_all_the_time():
    config = shipped("convert_msa.yaml")
    assert config.msa.warmup_steps == config.train.steps
    assert config.train.freeze == ["*", "!*.index_*"]
    assert config.train.seq_len > config.msa.spec().dense_tokens


def test_the_quickstart_runs_without_a_gpu_or_a_download():
    config = shipped("quickstart.yaml")
    assert config.data.source == "python"
    assert config.data.tokenizer == "bytes"
    assert config.runtime.device in ("auto", "cpu")
