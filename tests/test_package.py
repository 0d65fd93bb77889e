"""The public face of the package: every name loads, and importing it loads nothing heavy."""

import subprocess
import sys

import pytest

import sparse_tl


def test_every_public_name_loads():
    for name in sparse_tl.__all__:
        assert getattr(sparse_tl, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = sparse_tl.no_such_name


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, sparse_tl.cli; print('torch' in sys.modules, 'pandas' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["False", "False"]
