"""Evaluation of a trained model: loss by position in the context, and recall by depth and length."""
