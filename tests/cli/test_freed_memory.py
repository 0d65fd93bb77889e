"""What a command's process frees stays with it."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, numpy as np
from sparse_tl.cli.memory import keep_freed_memory
if {keep}:
    keep_freed_memory()
np.ones(2**21)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    np.ones(2**21)  # 16 MB: 4,096 pages of 4 kB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*, keep: bool) -> int:
    code = FAULTS.format(keep=keep)
    # Larger pages would hide them.
    switched = {"NUMPY_MADVISE_HUGEPAGE": "0", "PATH": "/usr/bin:/bin"}
    return int(subprocess.check_output([sys.executable, "-c", code], env=switched, text=True))


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    kept = page_faults(keep=True)
    assert kept < 4096
    assert page_faults(keep=False) > 4 * kept
