"""SVG to PNG without a browser, with text on machines that have no fonts."""

from __future__ import annotations

from contextlib import ExitStack
from importlib import resources

# Subsets of DejaVu 2.37, made with fonttools:
#   pyftsubset DejaVuSans.ttf --no-hinting --layout-features=kern --unicodes=U+0020-007E,
#   U+00A0-017F,U+0192,U+0218-021B,U+02C6,U+02DC,U+0391-03A9,U+03B1-03C9,U+0400-045F,U+2010-2026,
#   U+2030,U+2032,U+2033,U+2039,U+203A,U+20AC,U+2122,U+2190-2199,U+21B5,U+21E5,U+2212,U+221E,
#   U+2248,U+2260,U+2264,U+2265,U+2400-2423,U+FFFD
_FONTS = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf")


def svg_to_png(svg: str, *, scale: float = 2.0) -> bytes:
    """Draw an SVG document.

    The package's own subset of DejaVu Sans writes Latin, Greek, Cyrillic and the usual symbols;
    the machine's fonts serve any other script.

    Args:
        svg: the document.
        scale: pixels of the PNG per pixel of the figure.

    Raises:
        ValueError: if the scale is not positive.
        ImportError: if ``resvg_py`` is not installed.
    """
    if not scale > 0:
        raise ValueError(f"expected a positive scale; got {scale}; 2 is sharp on most screens")
    try:
        import resvg_py  # only PNG files need it
    except ImportError as error:
        raise ImportError(
            "expected the package resvg_py, which draws PNG files; install it with "
            "`pip install resvg-py`, or save as .svg"
        ) from error
    folder = resources.files("sparse_tl.plots") / "fonts"
    with ExitStack() as stack:
        fonts = [str(stack.enter_context(resources.as_file(folder / name))) for name in _FONTS]
        return bytes(
            resvg_py.svg_to_bytes(
                svg_string=svg,
                zoom=scale,
                font_files=fonts,
                font_family="DejaVu Sans",
                sans_serif_family="DejaVu Sans",
            )
        )
