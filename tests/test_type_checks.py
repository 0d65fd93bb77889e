"""The checks of shapes that pytest switches on are on, in every test anew."""

import pytest
import torch
from jaxtyping import TypeCheckError
from type_checks import CALLS

from sparse_tl.metrics import divergence


@pytest.mark.parametrize("again", range(2))
def test_wrong_shapes_are_refused(again: int) -> None:
    for _ in range(CALLS):
        with pytest.raises(TypeCheckError, match="divergence"):
            divergence(torch.zeros(2, 3), torch.zeros(2, 4))
