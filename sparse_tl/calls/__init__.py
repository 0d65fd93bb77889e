"""What public calls share; here, the ranges of numbers that arguments and settings accept."""

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

MOST = 10**9
"""Largest count of steps, prompts or parts, since a longer run would not end; and largest rate or
cost, since optimizers overflow beyond it."""

Count = Annotated[int, Ge(0), Le(MOST)]
AtLeastOne = Annotated[int, Ge(1), Le(MOST)]
Seed = Annotated[int, Ge(0), Lt(2**63)]
Positive = Annotated[float, Gt(0), Le(MOST)]
NotNegative = Annotated[float, Ge(0), Le(MOST)]
Fraction = Annotated[float, Ge(0), Le(1)]
Logit = Annotated[float, Ge(-10_000), Le(10_000)]
Share = Annotated[float, Gt(0), Le(1)]
