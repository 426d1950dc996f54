"""How much of full attention the selected blocks hold, by layer.

Full attention has the same queries and keys: those of the selected branch in an NSA layer. The mass of a query is the
share of its attention weights that its blocks hold. The heaviest blocks of a query and key/value head are as many as it
reads, those with the most attention. Both are means over the queries that see more blocks than they read. A layer
without such queries, and a dense layer, reads everything.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from nsa.errors import ConfigError
from nsa.nn.attention import Attention, DenseAttention, attention_layers
from nsa.nn.model import Decoder
from nsa.ops.observe import observing
from nsa.record.attention_stats import quality_numbers


@contextmanager
def selection_by_layer(model: Decoder) -> Iterator[list[dict[str, Any]]]:
    """Measures all forward passes inside. At the end, the list has a row for every layer that selects or is dense."""
    names = {
        layer: name
        for name, layer in attention_layers(model)
        if "selection" in layer.statistics or type(layer) is DenseAttention
    }
    if not names:
        raise ConfigError("--selection: no layer of the model selects blocks; evaluate a model with nsa or msa layers")
    device = model.head.weight.device
    sums = {name: torch.zeros(3, dtype=torch.float64, device=device) for name in names.values()}
    calls, rows = list[tuple[Any, ...]](), list[dict[str, Any]]()  # of selected attention in a layer; the result
    observer = SimpleNamespace(failures=0, read=lambda *call: calls.append(call))

    def add(layer: Attention, *_: Any) -> None:
        with torch.autocast(device.type, enabled=False):
            for call in calls:
                sums[names[layer]] += quality_numbers(*call)
        calls.clear()

    hooks = [layer.register_forward_hook(add) for layer in names]
    try:
        with observing(observer):
            yield rows
    finally:
        for hook in hooks:
            hook.remove()
    for name, numbers in sums.items():
        queries, mass, heaviest = numbers.tolist()
        shares = (mass / queries, heaviest / queries) if queries else (1.0, 1.0)
        rows.append({"layer": name, "queries": int(queries), "mass": shares[0], "heaviest": shares[1]})
