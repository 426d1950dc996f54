"""Triton kernels for sm_80 and sm_90, one file beside each of the reference's, with the same functions."""
