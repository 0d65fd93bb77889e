"""Whole jobs from settings to an output folder; what the command line runs."""

from sparse_tl.runs.addition import AdditionRun, run_addition
from sparse_tl.runs.circuits import CircuitsRun, run_circuits
from sparse_tl.runs.text import TextRun, run_post_training

__all__ = [
    "AdditionRun",
    "CircuitsRun",
    "TextRun",
    "run_addition",
    "run_circuits",
    "run_post_training",
]
