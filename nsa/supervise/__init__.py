"""Decides when a process of a run ends, and why: launch guard, signals, watchdog."""
