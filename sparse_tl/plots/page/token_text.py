"""Token text in figures: whitespace made visible, long tokens clipped.

Font sizes and widths are in pixels.
"""

from __future__ import annotations

import unicodedata
from itertools import accumulate, takewhile

ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
SMALLEST_SIZE = 11.0
"""Smallest font size that is easy to read, in pixels."""
SPACE = "\N{MIDDLE DOT}"
# Next to punctuation, or alone, a dot would look like a full stop.
SPACE_IN_PUNCTUATION = "\N{OPEN BOX}"
OTHER_SPACE = "\N{SHOULDERED OPEN BOX}"
"""For no-break spaces and all others that would be blank."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LEFT_TO_RIGHT = "\N{LEFT-TO-RIGHT MARK}"

_WHITESPACE = {
    "\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}",
    "\t": "\N{RIGHTWARDS ARROW TO BAR}",
}
# Widths in em of DejaVu Sans, which is wider than other common sans-serif fonts: text that fits by
# this table fits in all of them.
_NARROW, _AVERAGE, _CAPITAL, _WIDE = 0.42, 0.64, 0.76, 1.0
_NARROW_CHARACTERS = frozenset("ijlrtfI.,:;'|!()[]` /\\")
_WIDE_CHARACTERS = frozenset("mwMWQO@%+=<>~^#" + ELLIPSIS + SPACE_IN_PUNCTUATION + OTHER_SPACE)
# Format characters are invisible, and some reorder the text around them: a label would misrepresent
# the token.
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_LONGEST_TEXT = 200


def visible_text(token: str) -> str:
    """The token for a figure, with every character visible and valid in XML.

    Spaces at the ends become middle dots, or open boxes in a token without letters and digits.
    No-break and other spaces become open boxes with shoulders. Line feeds and tabs become arrows,
    other control characters their Unicode pictures. Characters that are invisible, invalid in XML,
    or change the direction of the text become the replacement character.
    """
    space = SPACE if any(map(str.isalnum, token)) else SPACE_IN_PUNCTUATION
    ended = token.rstrip(" ")
    inner = ended.lstrip(" ")
    others = {c for c in inner if c != " " and unicodedata.category(c) == "Zs"}
    shown = "".join(OTHER_SPACE if c in others else _visible_character(c) for c in inner)
    return space * (len(ended) - len(inner)) + shown + space * (len(token) - len(ended))


def running_text(text: str) -> str:
    """A longer text: like `visible_text`, but with plain spaces."""
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character in _WHITESPACE:
        return _WHITESPACE[character]
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\N{SYMBOL FOR DELETE}"
    is_noncharacter = (code & 0xFFFE) == 0xFFFE or 0xFDD0 <= code <= 0xFDEF
    if is_noncharacter or unicodedata.category(character) in _UNPRINTABLE:
        return REPLACEMENT
    return character


def shorten(text: str) -> str:
    """A visible text for tooltips; of a very long one, the beginning and the length."""
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]}{ELLIPSIS} ({len(text):,} characters)"


def text_width(text: str, font_size: float) -> float:
    """An upper estimate of the width of a text in pixels."""
    return font_size * sum(map(_em_width, text))


def _em_width(character: str) -> float:
    if unicodedata.combining(character) or character == LEFT_TO_RIGHT:
        return 0.0
    if unicodedata.east_asian_width(character) in {"W", "F"} or character in _WIDE_CHARACTERS:
        return _WIDE
    if character in _NARROW_CHARACTERS:
        return _NARROW
    return _CAPITAL if character.isupper() else _AVERAGE


def clip_text(text: str, font_size: float, max_width: float) -> str:
    """The text, or its beginning with an ellipsis, within a width; always its first character."""
    if text_width(text, font_size) <= max_width:
        return text
    ends = accumulate(map(_em_width, text), initial=_em_width(ELLIPSIS))
    room = max_width / font_size
    n_kept = sum(1 for _ in takewhile(lambda end: end <= room, ends)) - 1
    return text[: max(1, n_kept)] + ELLIPSIS


def wrap_text(text: str, font_size: float, max_width: float) -> list[str]:
    """The words of a text in lines that fit; a word that is too long has its own line."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, font_size) <= max_width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def fit_text(text: str, font_size: float, max_width: float) -> tuple[str, float]:
    """A text with the largest font size up to `font_size` at which it fits, or clipped at the
    smallest legible size."""
    fitting = max_width / max(text_width(text, 1.0), 1e-9)
    size = max(SMALLEST_SIZE, min(font_size, fitting))
    return clip_text(text, size, max_width), size
