"""What every adapter, hook and check builds on: the interface to a model and its hook points."""
