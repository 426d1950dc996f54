"""Evaluation of a trained model: loss by position in the context, recall, tasks, and what selection misses."""
