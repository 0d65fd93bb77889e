"""Files: atomic writes, checksums, locks, and formats from which nothing is unpickled."""
