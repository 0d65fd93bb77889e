from .addition import run_addition as run_addition
from .circuits import Comparison as Comparison, run_circuits as run_circuits
from .doctor import Check as Check, run_doctor as run_doctor
from .folder import SparseRun as SparseRun
from .head_roles import HeadRolesRun as HeadRolesRun, run_head_roles as run_head_roles
from .one_model import run_graph as run_graph, run_head_behaviour as run_head_behaviour
from .post_training import run_post_training as run_post_training
