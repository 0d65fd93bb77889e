"""The command line ``sparse-tl``."""

from sparse_tl.cli import commands
from sparse_tl.cli.app import app
from sparse_tl.cli.errors import main

__all__ = ["app", "commands", "main"]
