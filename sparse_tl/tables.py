"""How results print in a notebook: what they say of themselves, and their numbers as a table."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def table_html(
    table: pd.DataFrame, said: str = "", *, digits: str = ".4g", index: bool = False
) -> str:
    """Words and a table as HTML; all texts are escaped.

    Args:
        table: the numbers.
        said: a sentence above it.
        digits: how numbers are written.
        index: whether the rows have names of their own.
    """
    words = f"<p>{escape(said)}</p>" if said else ""
    # Counts stay readable: 123,457 and not 1.235e+05.
    return words + table.to_html(
        float_format=lambda x: format(x, ",.0f" if abs(x) >= 1e4 else digits),
        border=0,
        index=index,
    )
