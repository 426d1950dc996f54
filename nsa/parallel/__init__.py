"""Parallelism, recomputation and compilation of a model, outside the model's own code."""
