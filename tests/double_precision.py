"""float64 models that are float64 throughout, so that exact laws can be tested exactly.

A TransformerBridge hands over to transformers, which computes softmax, RMS norms and rotary
embeddings in float32 whatever the model is in: it is right to 1e-7, and as a function of its
weights it is a staircase, which has no finite differences. Only GPT-2's architecture is spared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class DoublePrecision(TorchFunctionMode):
    """Inside the block what is float64 stays so: nothing makes float32 of it on the way."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func in (Tensor.to, Tensor.type):
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
