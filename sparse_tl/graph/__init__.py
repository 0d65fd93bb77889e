"""The parts of a model: names, grids and the computational graph, independent of any model."""
