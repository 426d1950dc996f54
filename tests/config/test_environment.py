"""The old environment variables: what each still switches, and who wins."""

import warnings

import pytest

from nsa.config import parse_config
from nsa.config.load import ConfigWarning


def kernels(environment, tree=None, overrides=()):
    return parse_config(tree or {}, "test", overrides, environment).runtime.kernels.chosen()


@pytest.mark.parametrize(
    ("variable", "value", "switched"),
    [
        ("NSA_USE_FA2", "0", {"cmp", "win"}),
        ("NSA_USE_FA2_WIN", "0", {"win"}),
        ("NSA_USE_FA2_CMP", "0", {"cmp"}),
        ("NSA_USE_TRITON_SEL", "0", {"sel"}),
        ("NSA_SDPA_NO_FLASH", "1", {"phi", "cmp", "select", "sel", "win", "mix"}),
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
    ("variable", "value", "told"),
    [
        ("NSA_USE_FA3", "0", "unknown variable; did you mean NSA_USE_FA2"),
        ("NSA_USE_SEL_PACK", "1", "nothing to switch"),
        ("NSA_USE_FA2", "no", "must be 0 or 1"),
        ("NSA_DDP_BUCKET_MB", "5", "does not read it"),
    ],
)
def test_what_cannot_be_followed_is_said(variable, value, told):
    with pytest.warns(ConfigWarning, match=told):
        assert kernels({variable: value}) == {}
