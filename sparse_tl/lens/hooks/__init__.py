"""Forward passes that record and replace activations, or skip what is not read."""
