"""Complete jobs from settings to an output folder; the command line runs these."""

from sparse_tl.runs.addition import AdditionRun as AdditionRun, run_addition as run_addition
from sparse_tl.runs.circuits import run_circuits as run_circuits
from sparse_tl.runs.comparison import Comparison as Comparison
from sparse_tl.runs.doctor import Check as Check, run_doctor as run_doctor
from sparse_tl.runs.folder import SparseRun as SparseRun
from sparse_tl.runs.head_roles import HeadRolesRun as HeadRolesRun, run_head_roles as run_head_roles
from sparse_tl.runs.text import run_post_training as run_post_training
