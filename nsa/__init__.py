"""Native Sparse Attention: operators, layers, models and a trainer.

Importing this package does no I/O, starts no CUDA and sets no environment variable.
"""

__version__ = "0.1.0"
