"""The public face of the package: every name loads, and importing it loads nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sparse_tl


def test_every_public_name_loads():
    for name in sparse_tl.__all__:
        assert getattr(sparse_tl, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = sparse_tl.no_such_name


def test_the_stub_lists_what_it_imports():
    """Type checkers read its imports, users its `__all__`."""
    tree = ast.parse(Path(sparse_tl.__file__).with_suffix(".pyi").read_text())
    imported = [
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert sorted(imported) == sorted(sparse_tl.__all__)


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, sparse_tl; print('torch' in sys.modules, 'pandas' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["False", "False"]
