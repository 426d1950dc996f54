"""Text from a trained model: sampling, decoding with a cache, CUDA graphs."""
