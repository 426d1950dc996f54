"""Checks whether a run can go to production on this machine, finds what is broken, and estimates its memory."""
