"""What the engine sets up for a device."""

import platform
import subprocess
import sys

import pytest

_COUNT_FAULTS = """
import resource, torch
from fullshard.engine.runtime import Runtime

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

Runtime.of(torch.device("cpu"))
torch.ones(4 << 20)
start = faults()
for _ in range(10):
    torch.ones(4 << 20)
print((faults() - start) // 10)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no threshold")
def test_large_blocks_that_come_and_go_cost_no_page_faults() -> None:
    command = [sys.executable, "-c", _COUNT_FAULTS]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    num_pages = (16 << 20) // 4096
    assert int(run.stdout) < num_pages // 100  # a tenth of them without the engine
