"""Figures of panels: curves, maps of heads and layers, scatter plots."""
