"""What a trained model can do: its loss by position in the context, and its recall by depth and length."""
