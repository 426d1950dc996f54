"""Reads a run folder: live view, report, trace report, health. Needs no torch."""
