"""Gates at sites: ``gate * clean + (1 - gate) * patch``. A gate of 1 keeps, a gate of 0 patches."""

from sparse_tl.gates.circuit_edges import (
    CircuitEdges as CircuitEdges,
    EdgesOfNeurons as EdgesOfNeurons,
    NeuronPatch as NeuronPatch,
)
from sparse_tl.gates.distributions import (
    BernoulliGate as BernoulliGate,
    GateDistribution as GateDistribution,
    HardConcreteGate as HardConcreteGate,
    SigmoidGate as SigmoidGate,
)
from sparse_tl.gates.interventions import (
    Intervention as Intervention,
    intervene as intervene,
    steer as steer,
)
from sparse_tl.gates.patches import (
    Patch as Patch,
    PatchValues as PatchValues,
)
from sparse_tl.gates.run import (
    GatedRun as GatedRun,
    ablate_attention_edges as ablate_attention_edges,
    ablate_heads as ablate_heads,
    gated as gated,
)
from sparse_tl.gates.sites import (
    AttentionEdges as AttentionEdges,
    ClosedAttentionEdges as ClosedAttentionEdges,
    Heads as Heads,
    HookPoints as HookPoints,
    Site as Site,
)
from sparse_tl.gates.sparse.counting import AttentionEdgeCounts as AttentionEdgeCounts
from sparse_tl.gates.sparse.learned_gates import (
    AttentionGates as AttentionGates,
    MLPGates as MLPGates,
    ScoreGates as ScoreGates,
    ShareGates as ShareGates,
)
from sparse_tl.gates.sparse.sparse_transformer import SparseTransformer as SparseTransformer
