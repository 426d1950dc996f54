"""The kinds of attention layers that a configuration may name. `nsa.nn.attention.register` adds others."""

KINDS = ["nsa", "msa", "dense", "window"]
