"""What each head does, from its attention and its output."""
