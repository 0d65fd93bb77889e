"""The command line ``sparse-tl``."""

from sparse_tl.cli import commands
from sparse_tl.cli.app import app, main

__all__ = ["app", "commands", "main"]
