"""Load and save models: hub names, folders and GGUF files, read as data."""
