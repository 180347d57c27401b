"""What `import fullshard` costs, told by what it imports; and that names which come late are as good."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

import fullshard
from tests.fresh import in_fresh_forks, in_fresh_python

SOURCE = Path(__file__).parent.parent / "src"


_FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="one process a program takes a fork")


def test_importing_the_library_imports_nothing_else() -> None:
    said = in_fresh_python(
        """
import inspect, sys, warnings
warnings.simplefilter("error")
import fullshard
print(*[name for name in sys.modules if name.startswith(("torch", "fullshard"))])
inspect.unwrap(fullshard), hasattr(fullshard, "__wrapped__")
print("torch" in sys.modules)
import fullshard.tools.report  # which a terminal waits for
print("torch" in sys.modules)
"""
    )
    assert said.splitlines() == ["fullshard.versions fullshard", "False", "False"]


@_FORKS
def test_using_the_library_imports_no_compiler_and_writing_it_no_engine() -> None:
    used, written = in_fresh_forks(
        """
import sys, fullshard
assert fullshard.comm.select and fullshard.policies  # rooms, without an import of their own
assert {"fully_shard", "__version__", "FSDPModule"} <= set(dir(fullshard))
from fullshard import *
print(all(globals()[name] is getattr(fullshard, name) for name in fullshard.__all__))
print([name in sys.modules for name in ("torch._dynamo", "torch.distributed.checkpoint")])
""",
        """
import inspect, sys, torch
from fullshard import MixedPrecisionPolicy, OffloadPolicy, fully_shard
inspect.signature(fully_shard)
print([name in sys.modules for name in ("fullshard.engine", "torch.distributed.tensor")])
print(fully_shard.state(torch.nn.Linear(1, 1)), "fullshard.engine" in sys.modules)
""",
    )
    assert used == (0, "True\n[False, False]\n", "")
    assert written == (0, "[False, False]\nNone True\n", "")


@_FORKS
def test_names_are_there_whatever_is_used_first() -> None:
    unknown, travelled, direct, version = in_fresh_forks(
        """
import fullshard
try:
    fullshard.fully_shart
except AttributeError as error:
    print(error)
""",
        f"""
import pickle
policy = pickle.loads({pickle.dumps(fullshard.OffloadPolicy())!r})
import inspect, fullshard
print(policy, "fully_shard.py" in inspect.getsourcefile(fullshard.fully_shard))
""",
        """
import fullshard.public
print(fullshard.fully_shard is fullshard.public.fully_shard)
""",
        """
import warnings, torch
torch.__version__ = "9.9"
import fullshard
print("imported")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fullshard.fully_shard
    fullshard.replicate
print([each.filename for each in caught], caught[0].message)
""",
    )
    assert unknown == (0, "module 'fullshard' has no attribute 'fully_shart'\n", "")
    assert travelled == (0, "OffloadPolicy() True\n", "")
    assert direct == (0, "True\n", "")
    assert version.out.startswith("imported\n['<string>'] fullshard was tested")


@pytest.mark.long  # a process for each
@_FORKS
def test_every_module_may_be_the_first_that_is_imported() -> None:
    # Public names were once imported before everything else, in an order that held no cycle.
    said = in_fresh_python(
        f"""
import os, sys
from pathlib import Path
import torch.distributed.tensor
root = Path({str(SOURCE)!r})
for path in sorted(root.rglob("*.py")):
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    if not (child := os.fork()):
        try:
            __import__(name)
            import fullshard
            fullshard.fully_shard
        except BaseException as error:
            print(name, repr(error), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    )
    assert said == ""
