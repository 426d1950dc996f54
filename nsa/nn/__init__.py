"""Layers and models with Native Sparse Attention."""

from nsa.nn.attention import NSAAttention, attention_layers
from nsa.nn.cache import KVCache
from nsa.nn.model import Decoder

__all__ = ["Decoder", "KVCache", "NSAAttention", "attention_layers"]
