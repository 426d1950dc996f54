"""Layers and models with sparse attention."""

from nsa.nn.attention import Attention, MSAAttention, NSAAttention, attention_layers
from nsa.nn.cache import KVCache
from nsa.nn.model import Decoder

__all__ = ["Attention", "Decoder", "KVCache", "MSAAttention", "NSAAttention", "attention_layers"]
