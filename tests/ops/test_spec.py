"""A geometry that breaks a rule is refused with the field and the rule."""

import subprocess
import sys

import numpy as np
import pytest

from nsa.errors import SpecError
from nsa.ops import NSASpec
from nsa.ops.layout import num_compressed, overlap_weights, visible_compressed


@pytest.mark.parametrize(
    ("sizes", "field", "rule"),
    [
        ({"cmp_block": 0}, "cmp_block", "at least 1"),
        ({"cmp_stride": -1}, "cmp_stride", "at least 1"),
        ({"window": 0}, "window", "at least 1"),
        ({"num_init": -1}, "num_init", "at least 0"),
        ({"num_local": True}, "num_local", "whole number"),
        ({"sel_block": 64.0}, "sel_block", "whole number"),
        ({"cmp_block": 24}, "cmp_stride", "divide cmp_block"),
        ({"sel_block": 72}, "cmp_stride", "divide sel_block"),
        ({"cmp_block": 128}, "cmp_block", "sel_block"),
        ({"num_selected": 2}, "num_selected", "num_init + num_local"),
    ],
)
def test_a_broken_rule_names_its_field(sizes, field, rule):
    with pytest.raises(SpecError) as error:
        NSASpec(**sizes)
    assert error.value.field == field
    assert rule in str(error.value)


def test_integers_of_numpy_are_sizes():
    spec = NSASpec(window=np.int64(512))
    assert spec == NSASpec()
    assert type(spec.window) is int


def test_the_defaults_are_the_papers():
    assert NSASpec().as_ints() == (32, 16, 64, 16, 1, 2, 512)


def test_overlap_weights_match_the_paper():
    assert overlap_weights(NSASpec()) == (-1, [1, 2, 2, 2, 1])


def test_block_counts_at_their_edges():
    spec = NSASpec()
    assert [num_compressed(n, spec) for n in (0, 31, 32, 47, 48)] == [0, 0, 1, 1, 2]
    assert [visible_compressed(t, spec) for t in (0, 30, 31, 46, 47)] == [0, 0, 1, 1, 2]


def test_the_spec_loads_without_torch():
    script = "import sys, nsa, nsa.config, nsa.ops.spec; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
