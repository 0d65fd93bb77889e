"""The command line ``sparse-tl``: one module per command, each on top of one function of `runs`."""

from sparse_tl.cli import addition, circuits, doctor, head_roles, post_train
from sparse_tl.cli.app import app
from sparse_tl.cli.errors import main

__all__ = ["addition", "app", "circuits", "doctor", "head_roles", "main", "post_train"]
