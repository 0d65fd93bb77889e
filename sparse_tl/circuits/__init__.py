"""Find the parts of a model that perform a task; works on dense and sparse models."""

from sparse_tl.circuits.circuit import Circuit as Circuit
from sparse_tl.circuits.comparison import (
    Overlap as Overlap,
    Roc as Roc,
    overlap as overlap,
    roc as roc,
)
from sparse_tl.circuits.effect import (
    EffectCurve as EffectCurve,
    Evaluation as Evaluation,
    multiplier as multiplier,
)
from sparse_tl.circuits.evaluation import (
    accuracy as accuracy,
    evaluate as evaluate,
    evaluate_circuit_edges as evaluate_circuit_edges,
    evaluate_heads as evaluate_heads,
    log_sizes as log_sizes,
)
from sparse_tl.circuits.exchange import (
    MIB_FRACTIONS as MIB_FRACTIONS,
    MIBEvaluation as MIBEvaluation,
    evaluate_mib as evaluate_mib,
    from_eap_ig as from_eap_ig,
    load_mib as load_mib,
    save_mib as save_mib,
    to_circuit_tracer as to_circuit_tracer,
    to_eap_ig as to_eap_ig,
)
from sparse_tl.circuits.faithfulness import Faithfulness as Faithfulness
from sparse_tl.circuits.found_circuit import FoundCircuit as FoundCircuit
from sparse_tl.circuits.heads import (
    KINDS as KINDS,
    HeadBehaviour as HeadBehaviour,
    head_behaviour as head_behaviour,
)
from sparse_tl.circuits.methods.acdc import acdc as acdc
from sparse_tl.circuits.methods.activation_patching import (
    ActivationPatching as ActivationPatching,
    patch_activations as patch_activations,
)
from sparse_tl.circuits.methods.attribution import (
    attribute_attention_edges as attribute_attention_edges,
    attribute_circuit_edges as attribute_circuit_edges,
    attribute_heads as attribute_heads,
)
from sparse_tl.circuits.methods.exact import patch_exactly as patch_exactly
from sparse_tl.circuits.methods.neuron_ranking import neuron_effects as neuron_effects
from sparse_tl.circuits.methods.per_prompt import (
    CircuitSizes as CircuitSizes,
    circuit_sizes_per_prompt as circuit_sizes_per_prompt,
)
from sparse_tl.circuits.methods.pruning import prune_circuit_edges as prune_circuit_edges
from sparse_tl.circuits.methods.score_check import (
    ScoreCheck as ScoreCheck,
    check_scores as check_scores,
)
from sparse_tl.circuits.methods.search import find_circuit as find_circuit
from sparse_tl.circuits.neurons import (
    DrivingToken as DrivingToken,
    NeuronEffects as NeuronEffects,
)
from sparse_tl.circuits.outcomes import Acdc as Acdc, Pruning as Pruning
from sparse_tl.circuits.prompt.attention_graph import AttentionGraph as AttentionGraph
from sparse_tl.circuits.prompt.logits import (
    LogitAttribution as LogitAttribution,
    LogitLens as LogitLens,
    attribute_logits as attribute_logits,
    logit_lens as logit_lens,
)
from sparse_tl.circuits.prompt.trace import trace_attention as trace_attention
from sparse_tl.circuits.scores import Scores as Scores
from sparse_tl.circuits.seeds import (
    SeedCurves as SeedCurves,
    SeedMultipliers as SeedMultipliers,
    seed_multipliers as seed_multipliers,
)
from sparse_tl.circuits.skill import (
    Skill as Skill,
    measure_skill as measure_skill,
)
