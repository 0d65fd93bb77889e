"""Numerical checks that a model behaves as the package assumes."""
