"""Find the parts of a model that perform a task; works on dense and sparse models."""

from sparse_tl.circuits.circuit import (
    Circuit as Circuit,
    Overlap as Overlap,
    Roc as Roc,
    Scores as Scores,
    overlap as overlap,
    roc as roc,
)
from sparse_tl.circuits.curves import (
    EffectCurve as EffectCurve,
    SeedCurves as SeedCurves,
    multiplier as multiplier,
    seed_multipliers as seed_multipliers,
)
from sparse_tl.circuits.evaluation import (
    Evaluation as Evaluation,
    evaluate as evaluate,
    evaluate_circuit_edges as evaluate_circuit_edges,
    evaluate_heads as evaluate_heads,
    log_sizes as log_sizes,
)
from sparse_tl.circuits.export import (
    MIBEvaluation as MIBEvaluation,
    evaluate_mib as evaluate_mib,
    from_eap_ig as from_eap_ig,
    load_mib as load_mib,
    save_mib as save_mib,
    to_circuit_tracer as to_circuit_tracer,
    to_eap_ig as to_eap_ig,
)
from sparse_tl.circuits.head_kinds import (
    KINDS as KINDS,
    HeadBehaviour as HeadBehaviour,
    head_behaviour as head_behaviour,
)
from sparse_tl.circuits.methods.attribution import (
    attribute_attention_edges as attribute_attention_edges,
    attribute_circuit_edges as attribute_circuit_edges,
    attribute_heads as attribute_heads,
)
from sparse_tl.circuits.methods.neurons import (
    DrivingToken as DrivingToken,
    NeuronEffects as NeuronEffects,
    neuron_effects as neuron_effects,
)
from sparse_tl.circuits.methods.patching import (
    ActivationPatching as ActivationPatching,
    ScoreCheck as ScoreCheck,
    check_scores as check_scores,
    patch_activations as patch_activations,
    patch_exactly as patch_exactly,
)
from sparse_tl.circuits.methods.pruning import (
    Acdc as Acdc,
    Pruning as Pruning,
    acdc as acdc,
    prune_circuit_edges as prune_circuit_edges,
)
from sparse_tl.circuits.methods.search import (
    CircuitSizes as CircuitSizes,
    FoundCircuit as FoundCircuit,
    circuit_sizes_per_prompt as circuit_sizes_per_prompt,
    find_circuit as find_circuit,
)
from sparse_tl.circuits.prompt.attention import (
    AttentionGraph as AttentionGraph,
    trace_attention as trace_attention,
)
from sparse_tl.circuits.prompt.attribution_graph import (
    AttributionGraph as AttributionGraph,
    attribution_graph as attribution_graph,
)
from sparse_tl.circuits.prompt.examples import (
    Examples as Examples,
    find_examples as find_examples,
    with_examples as with_examples,
)
from sparse_tl.circuits.prompt.graph_checks import (
    GraphCheck as GraphCheck,
    check_graph as check_graph,
    graph_effect as graph_effect,
    scale_nodes as scale_nodes,
)
from sparse_tl.circuits.prompt.logits import (
    LogitAttribution as LogitAttribution,
    LogitLens as LogitLens,
    attribute_logits as attribute_logits,
    logit_lens as logit_lens,
)
from sparse_tl.circuits.prompt.transcoders import (
    Transcoders as Transcoders,
    load_transcoders as load_transcoders,
)
from sparse_tl.circuits.task_skill import (
    Skill as Skill,
    accuracy as accuracy,
    measure_skill as measure_skill,
)
