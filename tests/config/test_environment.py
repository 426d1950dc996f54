"""The old environment variables: what each sets, and which setting wins."""

import warnings

import pytest

from nsa.config import parse_config
from nsa.config.load import ConfigWarning
from nsa.config.schema import KernelsConfig
from nsa.errors import ConfigError


def kernels(environment, tree=None, overrides=()):
    return parse_config(tree or {}, "test", overrides, environment).runtime.kernels.chosen()


@pytest.mark.parametrize(
    ("variable", "value", "switched"),
    [
        ("NSA_USE_FA2", "0", {"cmp", "win"}),
        ("NSA_USE_FA2_WIN", "0", {"win"}),
        ("NSA_USE_FA2_CMP", "0", {"cmp"}),
        ("NSA_USE_TRITON_SEL", "0", {"sel"}),
        ("NSA_SDPA_NO_FLASH", "1", set(KernelsConfig.model_fields)),
        ("NSA_USE_FA2", "1", set()),
        ("NSA_SDPA_NO_FLASH", "0", set()),
    ],
)
def test_a_variable_switches_its_kernels_to_the_reference(variable, value, switched):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels({variable: value, "HOME": "/"}) == dict.fromkeys(switched, "reference")


def test_an_explicit_key_wins_with_a_warning():
    with pytest.warns(ConfigWarning, match=r"NSA_USE_FA2: runtime\.kernels\.win is set to 'triton' explicitly"):
        chosen = kernels({"NSA_USE_FA2": "0"}, overrides=["runtime.kernels.win=triton"])
    assert chosen == {"cmp": "reference", "win": "triton"}


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("NSA_USE_FA3", "0", "unknown variable; did you mean NSA_USE_FA2"),
        ("NSA_USE_SEL_PACK", "1", "has no effect"),
        ("NSA_USE_FA2", "no", "must be one of 0, 1"),
        ("NSA_FSDP_LIMIT_ALL_GATHERS", "1", "always limited"),
        ("NSA_DDP_SAFE_MODE", "yes", "must be one of 0, 1"),
        ("NSA_DDP_BUCKET_MB", "-3", "must be an integer"),
        ("NSA_FSDP_SHARDING", "half", "must be one of full"),
    ],
)
def test_an_unknown_variable_or_value_gives_a_warning(variable, value, message):
    with pytest.warns(ConfigWarning, match=message):
        assert kernels({variable: value}) == {}


@pytest.mark.parametrize(
    ("variable", "value", "section", "key", "wanted"),
    [
        ("NSA_DDP_SAFE_MODE", "1", "parallel.ddp", "safe_mode", True),
        ("NSA_DISABLE_AUX_STATS", "1", "telemetry", "attention", False),
        ("NSA_TRACE_GRADS", "1", "telemetry", "trace_grads", True),
        ("NSA_TRACE_MODULE_BWD", "1", "telemetry", "trace_modules", True),
        ("NSA_TRACE_DDP_BUCKETS", "1", "telemetry", "trace_buckets", True),
        ("NSA_DDP_STATIC_GRAPH", "1", "parallel.ddp", "static_graph", True),
        ("NSA_DDP_FIND_UNUSED", "1", "parallel.ddp", "find_unused", True),
        ("NSA_DDP_BUCKET_MB", "7", "parallel.ddp", "bucket_mb", 7),
        ("NSA_FSDP_SHARDING", "SHARD_GRAD_OP", "parallel.fsdp", "sharding", "grad_op"),
        ("NSA_FSDP_SHARDING", "full", "parallel.fsdp", "sharding", "full"),
        ("NSA_FSDP_FORWARD_PREFETCH", "0", "parallel.fsdp", "forward_prefetch", False),
        ("NSA_ALLOW_SINGLE_RANK", "1", "parallel", "allow_single_rank", True),
        ("NSA_FORCE_BRANCH", "cmp", "nsa", "force_branch", "cmp"),
        ("NSA_MEM_DUMP_EVERY", "100", "telemetry", "mem_dump_every", 100),
        ("NSA_TB_DISABLE", "1", "telemetry", "tensorboard", False),
    ],
)
def test_a_variable_sets_its_key_and_an_explicit_one_wins(variable, value, section, key, wanted):
    def read(config):
        for name in section.split("."):
            config = getattr(config, name)
        return getattr(config, key)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(parse_config({}, "test", (), {variable: value})) == wanted
    other = {True: "false", False: "true", "full": "grad_op", "grad_op": "full", "cmp": "win"}.get(wanted, "3")
    with pytest.warns(ConfigWarning, match=rf"{variable}: {section}\.{key} is set to .* explicitly"):
        config = parse_config({}, "test", [f"{section}.{key}={other}"], {variable: value})
    assert read(config) != wanted


def test_a_value_that_cannot_be_is_blamed_on_the_variable():
    with pytest.raises(ConfigError, match=r"^NSA_DDP_BUCKET_MB: parallel\.ddp\.bucket_mb: must be greater"):
        parse_config({}, "my.yaml", environment={"NSA_DDP_BUCKET_MB": "0"})
