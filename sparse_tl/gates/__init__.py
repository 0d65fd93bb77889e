"""Gates at sites: ``gate * clean + (1 - gate) * patch``. A gate of 1 keeps, a gate of 0 patches."""

from sparse_tl.gates.ablation import (
    ablate_attention_edges as ablate_attention_edges,
    ablate_heads as ablate_heads,
)
from sparse_tl.gates.circuit_edges import CircuitEdges as CircuitEdges
from sparse_tl.gates.closed_edges import (
    ClosedAttentionEdges as ClosedAttentionEdges,
    ClosedByRule as ClosedByRule,
)
from sparse_tl.gates.columns import Columns as Columns
from sparse_tl.gates.distributions import (
    BernoulliGate as BernoulliGate,
    GateDistribution as GateDistribution,
    GateMode as GateMode,
    HardConcreteGate as HardConcreteGate,
    SigmoidGate as SigmoidGate,
    expected_size as expected_size,
)
from sparse_tl.gates.hook_points import hook_points as hook_points
from sparse_tl.gates.neurons import (
    EdgesOfNeurons as EdgesOfNeurons,
    NeuronPatch as NeuronPatch,
)
from sparse_tl.gates.patches import (
    Patch as Patch,
    PatchName as PatchName,
    PatchValues as PatchValues,
)
from sparse_tl.gates.run import (
    GatedRun as GatedRun,
    gated as gated,
)
from sparse_tl.gates.sites import (
    AttentionEdges as AttentionEdges,
    Heads as Heads,
    HookPoints as HookPoints,
    Site as Site,
)
from sparse_tl.gates.sparse.attention import AttentionGates as AttentionGates, GateKind as GateKind
from sparse_tl.gates.sparse.counting import AttentionEdgeCounts as AttentionEdgeCounts
from sparse_tl.gates.sparse.mlps import MLPGates as MLPGates
from sparse_tl.gates.sparse.score_gates import ScoreGates as ScoreGates
from sparse_tl.gates.sparse.share_gates import ShareGates as ShareGates
from sparse_tl.gates.sparse.sparse_transformer import SparseTransformer as SparseTransformer
from sparse_tl.gates.steering import steer as steer
