"""From text to batches: sources, tokenizers, a packed stream, and batches as a pure function of position."""
