"""Triton kernels for sm_80 and sm_90: one file for each file of the reference, with the same functions."""
