"""What `import fullshard` costs, told by what it imports; and that names which come late are as good."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

import fullshard
from tests.fresh import in_fresh_python

SOURCE = Path(__file__).parent.parent / "src"


def test_every_name_is_there_and_no_import_warns() -> None:
    said = in_fresh_python(
        """
import fullshard
assert fullshard.comm.select and fullshard.policies  # rooms, without an import of their own
assert {"fully_shard", "__version__", "FSDPModule"} <= set(dir(fullshard))
from fullshard import *
print(all(globals()[name] is getattr(fullshard, name) for name in fullshard.__all__))
""",
        options=("-W", "error"),
    )
    assert said == "True\n"


def test_importing_the_library_imports_nothing_else_and_using_it_no_compiler() -> None:
    said = in_fresh_python(
        """
import sys
import fullshard
print(*[name for name in sys.modules if name.startswith(("torch", "fullshard"))])
for name in fullshard.__all__:
    getattr(fullshard, name)
print("torch" in sys.modules, "torch._dynamo" in sys.modules)
"""
    )
    assert said.splitlines() == ["fullshard.versions fullshard", "True False"]


def test_an_unknown_name_is_an_attribute_error_and_dunders_import_nothing() -> None:
    said = in_fresh_python(
        """
import inspect, sys
import fullshard
inspect.unwrap(fullshard), hasattr(fullshard, "__wrapped__")
print("torch" in sys.modules)
try:
    fullshard.fully_shart
except AttributeError as error:
    print(error)
"""
    )
    assert said.splitlines() == ["False", "module 'fullshard' has no attribute 'fully_shart'"]


def test_classes_travel_between_processes_as_before() -> None:
    said = in_fresh_python(
        """
import pickle, sys
policy = pickle.loads(sys.argv[1].encode("latin-1"))
import inspect, fullshard
print(policy, "fully_shard.py" in inspect.getsourcefile(fullshard.fully_shard))
""",
        _pickled_without_zeros(),
    )
    assert said.strip() == "OffloadPolicy() True"


def _pickled_without_zeros() -> str:
    """An argument of a process has no zero byte: protocol 0."""
    return pickle.dumps(fullshard.OffloadPolicy(), protocol=0).decode("latin-1")


def test_the_version_of_torch_is_checked_at_the_first_use_and_names_that_line() -> None:
    said = in_fresh_python(
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
"""
    )
    assert said.startswith("imported\n['<string>'] fullshard was tested with torch")


@pytest.mark.long  # a process for each
@pytest.mark.skipif(not hasattr(os, "fork"), reason="one process a module takes a fork")
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
        except BaseException as error:
            print(name, repr(error), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    )
    assert said == ""
