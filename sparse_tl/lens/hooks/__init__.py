"""Forward passes that record and replace activations, or skip what nobody reads."""
