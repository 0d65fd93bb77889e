"""Files: atomic writes, locks, and formats from which nothing is unpickled."""
