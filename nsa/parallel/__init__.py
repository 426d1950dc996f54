"""How a model is spread and recomputed, outside the model's own code."""
