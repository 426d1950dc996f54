"""The definition of every operator in plain PyTorch: any device, any float type, memory linear in S."""
