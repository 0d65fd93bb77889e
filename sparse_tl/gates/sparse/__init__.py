"""Models with learnable gates on attention edges and MLPs."""
