"""What public calls share: argument checks, gradients, blocks of `with`, devices, memory errors."""
