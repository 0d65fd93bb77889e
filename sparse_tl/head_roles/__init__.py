"""Causal head gating: which heads help, do not matter or harm, and what ablating them does."""

from sparse_tl.head_roles.ablation import (
    AblationCurve as AblationCurve,
    ablation_curve as ablation_curve,
)
from sparse_tl.head_roles.fitting import (
    ContrastiveGates as ContrastiveGates,
    fit_contrastive_head_gates as fit_contrastive_head_gates,
    fit_head_gates as fit_head_gates,
)
from sparse_tl.head_roles.likelihood import target_log_probabilities as target_log_probabilities
from sparse_tl.head_roles.roles import ROLES as ROLES, HeadRoles as HeadRoles
