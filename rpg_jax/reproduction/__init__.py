"""Reproduces the paper's comparisons as tables of runs, at a scale that a laptop can check."""
