"""Steering: add a vector to the activations at a hook point, ``activation + scale * vector``.

Unlike a gate, which takes something away, this adds something that the model did not compute.

Reference: Turner et al., arXiv 2308.10248 (activation addition).
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.calls.arguments import checked
from sparse_tl.calls.scopes import scope
from sparse_tl.gates.columns import Columns, meant
from sparse_tl.lens import (
    EMBEDDED,
    Hook,
    HookedModel,
    Order,
    adapt,
    attached,
    evaluation_mode,
)


@checked
@scope
def steer(
    model: HookedModel,
    name: str,
    vector: Float[Tensor, "*size"],
    *,
    scale: float = 1.0,
    positions: Columns | None = None,
) -> Iterator[None]:
    """Inside the block, add ``scale * vector`` to the activations at a hook point.

    ``positions=slice(0, 15)`` steers the 15 tokens of a prompt, and none that `generate` adds, with
    or without a key-value cache. The model is in evaluation mode in the block.

    Args:
        model: dense or sparse model.
        name: hook point, such as "blocks.3.hook_resid_pre".
        vector: vector of the size of one position's activation: ``[d_model]`` in the residual
            stream, ``[head, d_head]`` at ``attn.hook_z``. Gradients reach it.
        scale: factor; negative to steer the other way.
        positions: columns to steer: one, a list, a slice, or a function that says whether to steer
            a column. Negative columns count from the end of the tokens that are run. By default
            all, including those of generated tokens.

    Raises:
        ValueError: the model lacks the hook point, or it has no position of its own to steer; when
            the model is run, the vector has another size than the activation, a listed position
            lies outside the prompts, or one counts from the end in a run with a key-value cache;
            when the block ends, the model was run to its end and never called the hook point.
    """
    adapter = adapt(model)
    if name.endswith(("hook_attn_scores", "hook_pattern")):
        raise ValueError(
            f"expected a hook point with a vector for each position; {name} has a number for each "
            "query and key: hook it by hand, or cut edges with ablate_attention_edges"
        )
    if not vector.isfinite().all():
        raise ValueError("expected a vector of finite numbers; some are NaN or infinite")
    start = end = 0  # the columns of this pass
    ran = fired = False

    def add(value: Float[Tensor, "batch pos *size"]) -> Tensor:
        if value.shape[2:] != vector.shape:
            raise ValueError(
                f"expected a vector of shape {tuple(value.shape[2:])} for each position at {name}; "
                f"got {tuple(vector.shape)}"
            )
        nonlocal fired
        fired = True
        change = scale * vector.to(value)
        if positions is None:
            return value + change
        n = value.shape[1]
        last = end or start + n
        chosen = meant(positions, start, last, first=last - n).to(value.device)
        return value + chosen.view(n, *[1] * vector.ndim) * change

    def begin(cached: Int[Tensor, ""]) -> None:
        nonlocal start, end
        start, end = int(cached), 0

    def note(residual: Float[Tensor, "batch pos d_model"]) -> None:
        # HookedTransformer's `hook_rot_k` has the keys of all columns, so a width is not enough.
        nonlocal end
        end = start + residual.shape[1]

    def done(*_: object) -> None:
        nonlocal ran
        ran = True

    hooks: list[Hook] = [(name, Order.FIRST, add)]
    if positions is not None:
        hooks += [("cached_columns", Order.FIRST, begin), (EMBEDDED, Order.FIRST, note)]
    handle = adapter.core.register_forward_hook(done)
    try:
        with attached(adapter, hooks), evaluation_mode(model):
            yield
    finally:
        handle.remove()
    if ran and not fired:
        raise ValueError(
            f"expected a hook point that the model calls; {name} of {adapter.name!r} never fired, "
            f"so nothing was steered. The residual stream is at hook points such as {EMBEDDED}"
        )
