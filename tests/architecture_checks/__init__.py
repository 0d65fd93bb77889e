"""What is checked of each architecture; docs/architectures.py makes a page of it.

Every check takes one architecture as one kind of model and raises a ValueError that says what is
wrong. It returns the largest difference found, of the largest entry, or what else there is to say.
"""

from __future__ import annotations

from collections.abc import Callable

from architecture_checks import circuits, gates, training
from architecture_checks.subject import Subject

CHECKS: dict[str, Callable[[Subject], float | str | None]] = {
    "gates open": gates.open_gates,
    "gates by hand": gates.gates_by_hand,
    "gradients": gates.gradients,
    "generation": gates.generation,
    "EAP": circuits.eap,
    "EAP-IG": circuits.eap_ig,
    "exact patching": circuits.exact_patching,
    "ACDC": circuits.search,
    "evaluation": circuits.evaluation,
    "head gating": training.head_gating,
    "post-training": training.post_training,
    "save and load": gates.saving,
}
