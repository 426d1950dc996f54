"""The training loop."""

from nsa.train.loop import train

__all__ = ["train"]
