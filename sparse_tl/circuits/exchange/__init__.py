"""Scores and circuits in the formats of other tools."""
