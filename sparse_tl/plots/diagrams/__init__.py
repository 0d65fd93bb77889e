"""Diagrams of circuits, and views of attention patterns."""
