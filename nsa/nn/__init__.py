"""Layers and models with sparse attention."""

from nsa.nn.attention import Attention, NSAAttention, attention_layers
from nsa.nn.cache import KVCache
from nsa.nn.model import Decoder

__all__ = ["Attention", "Decoder", "KVCache", "NSAAttention", "attention_layers"]
