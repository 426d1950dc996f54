"""The picture of docs/msa.md shows what the layers read."""

import pytest
import torch

from bench import masks
from nsa.ops.layout import num_read


def test_every_query_of_the_picture_reads_its_blocks_its_window_and_nothing_later():
    t = torch.arange(masks.TOKENS)
    for kind, spec in (("NSA", masks.NSA), ("MSA", masks.MSA)):
        read = masks.masks()[kind]
        assert read["selected"].sum(1).tolist() == num_read(t, spec).tolist()
        assert not any(mask.triu(1).any() for mask in read.values())
    nsa = masks.masks()["NSA"]
    assert nsa["window"].sum(1).tolist() == (t + 1).clamp(max=masks.NSA.window).tolist()
    assert nsa["compressed"].sum(1).tolist() == [(n + 1) // 4 * 4 if n >= 7 else 0 for n in t.tolist()]


def test_the_picture_is_readable_on_light_and_on_dark_pages(tmp_path):
    pytest.importorskip("matplotlib")
    masks.draw_figure(tmp_path / "msa.svg")
    drawn = (tmp_path / "msa.svg").read_text()
    assert "#000000" not in drawn
    assert "#ffffff" not in drawn
