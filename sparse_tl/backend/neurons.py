"""The neurons of an MLP: what each of them writes to the residual stream.

With the activations a at ``mlp.hook_post`` (of a gated MLP, ``act(gate) * up``), an MLP writes

    factor * (sum_n a_n W_out[n] + b_out),

where W_out includes the weight of a norm after the MLP. The factor, one number per token, is 1 in
most models; otherwise, a gate on the MLP or the scale of such a norm determines it in each run.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from jaxtyping import Float
from torch import Tensor

from sparse_tl.backend.interface import Adapter
from sparse_tl.backend.lora import effective_weight
from sparse_tl.backend.numerics import excess, precise


def neuron_directions(adapter: Adapter, layer: int) -> Float[Tensor, "neuron d_model"]:
    """The direction in the residual stream that each neuron of an MLP writes along."""
    weight, _ = _output(adapter, layer)
    return weight


def neuron_coefficients(
    adapter: Adapter,
    layer: int,
    post: Float[Tensor, "*tokens neuron"],
    written: Float[Tensor, "batch pos d_model"],
) -> Float[Tensor, "batch pos neuron"]:
    """The multiple of its direction that each neuron writes: factor times activation.

    `post` are the activations at ``mlp.hook_post``, `written` what the MLP writes.
    """
    weight, bias = map(precise, _output(adapter, layer))
    if post.shape[-1] != len(weight):
        raise _refusal(adapter, layer)
    post, found = precise(post.reshape(*written.shape[:2], -1)), precise(written)
    whole = post @ weight + bias
    square = whole.square().sum(dim=-1, keepdim=True)
    factor = (whole * found).sum(dim=-1, keepdim=True) / square.where(square > 0, 1.0)
    size = (post.square() @ weight.square()).sqrt() + bias.abs() + whole.abs()
    if excess(adapter.dtype, found, factor * whole, factor.abs() * size + found.abs()) is not None:
        raise _refusal(adapter, layer)
    return factor * post


def _output(
    adapter: Adapter, layer: int
) -> tuple[Float[Tensor, "neuron d_model"], Float[Tensor, " d_model"]]:
    """The matrix and the bias that turn an MLP's activations into its output."""
    mlp: Any = adapter.model.blocks[layer].mlp
    out = getattr(mlp, "out", None)  # absent in a HookedTransformer
    with nullcontext() if out is None else effective_weight(out):
        weight, bias = getattr(mlp, "W_out", None), getattr(mlp, "b_out", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise _refusal(adapter, layer)
    bias = weight.new_zeros(adapter.d_model) if bias is None else bias
    norm = adapter.norm(layer, "after_mlp").weight
    return (weight, bias) if norm is None else (weight * norm, bias * norm)


def _refusal(adapter: Adapter, layer: int) -> ValueError:
    return ValueError(
        f"m{layer} of {adapter.name!r} does not write the sum of its neurons: it is a mixture of "
        "experts, its output is centred, or a hook on the model edits it"
    )
