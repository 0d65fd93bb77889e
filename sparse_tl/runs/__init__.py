"""Whole jobs from settings to an output folder; what the command line runs."""

from sparse_tl.runs.addition import AdditionRun, run_addition
from sparse_tl.runs.circuits import run_circuits
from sparse_tl.runs.comparison import Comparison
from sparse_tl.runs.doctor import Check, run_doctor
from sparse_tl.runs.folder import SparseRun
from sparse_tl.runs.head_roles import HeadRolesRun, run_head_roles
from sparse_tl.runs.text import run_post_training

__all__ = [
    "AdditionRun",
    "Check",
    "Comparison",
    "HeadRolesRun",
    "SparseRun",
    "run_addition",
    "run_circuits",
    "run_doctor",
    "run_head_roles",
    "run_post_training",
]
