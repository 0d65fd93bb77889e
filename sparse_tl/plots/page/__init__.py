"""What all figures share: style, token texts, scripts, and how they display and save themselves."""
