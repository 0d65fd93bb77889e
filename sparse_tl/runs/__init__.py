"""Whole jobs from settings to an output folder; what the command line runs."""

from sparse_tl.runs.addition import AdditionRun, run_addition
from sparse_tl.runs.text import TextRun, run_post_training

__all__ = ["AdditionRun", "TextRun", "run_addition", "run_post_training"]
