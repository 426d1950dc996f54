"""The training loop."""

from nsa.train.trainer import train

__all__ = ["train"]
