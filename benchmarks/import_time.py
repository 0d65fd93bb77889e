"""Seconds that importing sparse_tl and all its names adds to `import transformer_lens`.

Usage: python benchmarks/import_time.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys

CODE = """
import time, transformer_lens
started = time.perf_counter()
import sparse_tl
imported = time.perf_counter()
for name in sparse_tl.__all__:
    getattr(sparse_tl, name)
print(imported - started, time.perf_counter() - started)
"""


def main() -> None:
    """Print the medians over five fresh processes."""
    runs = [
        [float(x) for x in subprocess.check_output([sys.executable, "-c", CODE], text=True).split()]
        for _ in range(5)
    ]
    imported, used = (statistics.median(column) for column in zip(*runs, strict=True))
    print(f"import sparse_tl: {imported:.3f} s; with every public name: {used:.3f} s")


if __name__ == "__main__":
    main()
