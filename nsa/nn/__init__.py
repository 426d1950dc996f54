"""Layers and models with Native Sparse Attention."""

from nsa.nn.attention import NSAAttention, attention_layers
from nsa.nn.model import Decoder

__all__ = ["Decoder", "NSAAttention", "attention_layers"]
