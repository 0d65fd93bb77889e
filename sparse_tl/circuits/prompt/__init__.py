"""Analyses of a single prompt."""
