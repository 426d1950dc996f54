"""The definition of every operator in plain PyTorch, for any device and float dtype, with memory linear in S."""
