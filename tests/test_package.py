"""The public face of the package: every name loads, and importing it loads nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sparse_tl


def test_every_public_name_loads():
    assert sorted(sparse_tl._HOMES) == sorted(sparse_tl.__all__)
    for name in sparse_tl.__all__:
        assert getattr(sparse_tl, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = sparse_tl.no_such_name


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(sparse_tl.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    homes = {
        alias.name: node.module.removeprefix("sparse_tl.")
        for node in guarded.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert homes == sparse_tl._HOMES


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, sparse_tl; print('torch' in sys.modules, 'pandas' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["False", "False"]
