"""How much each attention edge carries: the size of what it writes, as a share of the stream.

    carried[q, k] = |w_qk| / (|x_q| + sum over heads and keys of |w_qk|),  w_qk = A_qk p_qk v_k W_O

with the gate A, the attention p, and the residual stream x that enters the layer. The share, 0 to
1, differs from attention most at *sinks*: tokens such as the first one, to which heads attend when
they have nothing to move. There p is large and v_k W_O small.

Reference: Kobayashi et al., arXiv 2004.10102, who compare these norms with attention. The division
is an addition of this package, to make layers comparable.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.calls.scopes import autograd
from sparse_tl.lens import Adapter


def carried_points(adapter: Adapter, layer: int) -> list[str]:
    """The hook points of a layer whose activations `carried` needs."""
    attention = [f"blocks.{layer}.attn.{name}" for name in ("hook_pattern", "hook_v", "hook_z")]
    return [f"blocks.{layer}.hook_resid_pre", *attention, adapter.heads_point(layer)]


@autograd(False)
def carried(
    adapter: Adapter, layer: int, kept: Mapping[str, Tensor]
) -> Float[Tensor, "head query key"]:
    """What each attention edge of a layer carries on one prompt.

    Args:
        adapter: adapter of the model.
        layer: layer of the edges.
        kept: activations at `carried_points`, each with a leading axis of 1.
    """
    parts = (kept[point][0] for point in carried_points(adapter, layer))
    stream, pattern, v, z, written = (part.to(adapter.gate_dtype) for part in parts)
    weight = adapter.W_O(layer).to(v)
    # |v W_O| from products of the rows of W_O: [key, head, d_model] does not fit for long prompts.
    products = weight @ weight.mT
    v = v.repeat_interleave(adapter.n_heads // v.shape[1], dim=1)
    sizes = torch.einsum("khd,hde,khe->hk", v, products, v).clamp(min=0).sqrt()
    # Some models normalise what attention writes, with a scale for each query.
    scale = written.flatten(1).norm(dim=1) / z.flatten(1).norm(dim=1).clamp(min=1e-30)
    writes = pattern * sizes[:, None, :] * scale[:, None]
    whole = stream.norm(dim=-1) + writes.sum(dim=(0, 2))
    return writes / whole.clamp(min=1e-30)[:, None]
