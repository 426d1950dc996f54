"""Estimates of the shipped configurations, of which each pass is traced once in a test process."""

from pathlib import Path
from unittest.mock import patch

from nsa.checks import memory_trace
from nsa.checks.memory_trace import trace
from nsa.config import Config, load_config
from nsa.config.schema import DataConfig, ParallelConfig, TrainConfig

ROOT = Path(__file__).parents[2]
PRODUCTION, BASE = "m7c_125m_1xa100_production", "m7c_125m"
SMALL = ["model.dim=64", "model.n_heads=4", "model.head_dim_k=16", "model.head_dim_v=16", "model.mlp_dim=128"]
SMALL += ["model.n_layers=1"]
_traces = {}


def traced_once(config, param_dtype):
    """`trace`. Many tests ask for the same pass: it is traced with what it depends on, and everything else at its
    default."""
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
    if key not in _traces:
        _traces[key] = trace(reduced, param_dtype)
    return _traces[key]


def config_of(name, *overrides):
    return load_config(ROOT / "configs" / f"{name}.yaml", list(overrides))


def under_torch(version):
    """Norms as that version of PyTorch computes them."""
    in_float32 = tuple(map(int, version.split(".")[:2])) >= (2, 12)
    return patch.object(memory_trace, "NORMS_IN_FLOAT32", in_float32)
