"""Every private name of torch that fullshard uses, and what for: the file to mend for a new torch.

Private is what has a leading underscore somewhere in its path. Such names may change in any
release, so no other module spells one out (tests/test_torch_private.py):

- functions, classes and modules are looked up here, once, and imported from here. They are torch's
  own objects, so calling one costs what it costs in torch;
- attributes of torch's objects, and torch's private operators, are used where they are, as a
  lookup here would cost a call in every step. `ATTRIBUTES` lists them.

A torch that lacks one makes the first use of fullshard raise ImportError, which says what was
needed for what. Nothing then fails in the middle of a step. What has an alternative has it here.
"""

import contextlib
import functools
import operator
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.versions import TESTED, WHAT_TO_INSTALL


@contextlib.contextmanager
def _to(purpose: str) -> Iterator[None]:
    """Look names up, for a purpose. Raises ImportError with it if torch lacks one."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise _lacking(str(error), purpose) from error


def _lacking(what: str, purpose: str) -> ImportError:
    return ImportError(
        f"fullshard cannot run with torch {torch.__version__}: {what}. It needs that to {purpose}. "
        f"It was tested with {TESTED}: {WHAT_TO_INSTALL}, or take a newer fullshard."
    )


# Autograd

with _to("tell whether autograd runs a backward, and which one (-1: none)"):
    current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

with _to("tell whether `torch.autograd.grad` returns the gradient of a leaf (raises RuntimeError)"):
    will_engine_execute_node = torch._C._will_engine_execute_node

with _to("tell which of two nodes of a graph was recorded first"):
    sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")

with _to("tell which node of a graph a backward runs (None: none), and the next number of one"):
    current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
    next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

with _to("run a backward in which function modes go on"):
    run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward

with _to("be called when all of a backward is done"):
    queue_callback: Callable[[Callable[[], None]], None]
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback

with _to("write to what autograd has saved, where the values come back before they are read"):
    from torch.autograd import _unsafe_preserve_version_counter as preserve_version_counters

with _to("put a node into graphs without `torch.autograd.Function`'s dispatch to transforms"):
    from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction

with _to("switch gradients off at a third of the cost of `torch.no_grad`"):
    set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled

with _to("walk through what a program's functions take and return"):
    from torch.utils import _pytree as pytree

# Transforms (``torch.func``), modes and subclasses

with _to("tell whether code runs inside a `torch.func` transform"):
    are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active

with _to("tell whether a `FakeTensorMode` is active"):
    _FAKE = torch._C._TorchDispatchModeKey.FAKE
    is_fake_mode_active: Callable[[], object] = functools.partial(
        torch._C._get_dispatch_mode, _FAKE
    )


with _to("run a model's operators without memory, and say why one cannot"):
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )

with _to("tell whose hooks change what autograd saves"):
    saved_tensor_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_fake(tensor: torch.Tensor) -> bool:
    """Tell tensors of a `FakeTensorMode`, whose class is imported only if there is a mode."""
    with _to("tell fake tensors"):
        from torch._subclasses import FakeTensor  # noqa: PLC0415
    return isinstance(tensor, FakeTensor)


with _to("work on plain tensors inside a `torch.func` transform"):
    WithoutTransforms = torch._C._DisableFuncTorch

with _to("tell whether a `TorchFunctionMode` watches the functions of `torch.distributed`"):
    is_function_mode_enabled: Callable[[], bool] = torch._C._is_torch_function_mode_enabled

with _to("look at tensors whose class refuses to be used"):
    WithoutSubclasses = torch._C.DisableTorchFunctionSubclass

with _to("look at tensors without a `TorchFunctionMode` that is told"):
    WithoutFunctions = torch._C.DisableTorchFunction

# The compiler, without importing it (a second)

with _to("keep functions out of compiled graphs"):
    disable_dynamo: Callable[..., Any] = torch._disable_dynamo

with _to("tell whether frames of this thread are being compiled"):
    compile_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback

with _to("let the compiler pass through a function, into those that it calls"):
    set_frame_strategy = torch._C._dynamo.eval_frame.set_code_exec_strategy
    SKIP_FRAME = torch._C._dynamo.eval_frame._FrameExecStrategy(
        torch._C._dynamo.eval_frame._FrameAction.SKIP,
        torch._C._dynamo.eval_frame._FrameAction.DEFAULT,
    )


def is_compiled_backward() -> bool:
    """Tell whether compiled autograd runs a backward, whose module is there once something asked for it."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


def around_compilations(begin: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Call functions before and after each compilation, unless that is so or nothing was compiled yet.

    ``torch._dynamo.reset()`` forgets them.
    """
    if (module := sys.modules.get("torch._dynamo.callback")) is None:
        return
    with _to("show the compiler parameters that share no memory"):
        handler = module.callback_handler
        if begin not in handler.start_callbacks:
            handler.register_start_callback(begin)
            handler.register_end_callback(end)


# The name of the module inside a compiled one, in paths of parameters.
COMPILED_MODULE = "_orig_mod"

# Memory

with _to("tell whether anybody else refers to a tensor's memory"):
    # Return the number of references to a storage, from C++ and Python: tensors and graphs. Takes
    # its address, `UntypedStorage._cdata`.
    storage_uses: Callable[[int], int] = torch._C._storage_Use_Count

# Return the number of references from C++ to a tensor: the ``.grad`` of another one, autograd's
# graph. None where torch lacks it: gradients' memory then counts as used.
tensor_uses: Any = getattr(torch.Tensor, "_use_count", None)

# Exchange the memory of two storages of one size, or of which one is empty: ``swap(storage, other)``. None
# where torch lacks it (2.11): units then get unsharded memory from the allocator, and gathers wait for more.
swap_memory: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)

# Let the allocator of CUDA call a function with (device, bytes asked for, total, free) before it raises
# for lack of memory. None where torch lacks it: the table of what takes memory is not written then.
attach_out_of_memory_observer: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)

with _to("map memory on all ranks of a group, for `set_symm_mem_for_comm`"):
    from torch.distributed import _symmetric_memory as symmetric_memory

# Operators that traces without memory call by themselves.
attention_math: Any = torch.ops.aten._scaled_dot_product_attention_math
efficient_attention: Any = torch.ops.aten._scaled_dot_product_efficient_attention
flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention
grouped_mm: Any = getattr(torch.ops.aten, "_grouped_mm", None)  # None where torch lacks it

# Process groups

with _to("announce this process to its peers, and name those that are lost"):
    from torch.distributed.distributed_c10d import _get_default_group as default_group
    from torch.distributed.distributed_c10d import _get_default_store as default_store

with _to("tell whether collectives of a group are being coalesced"):
    from torch.distributed.distributed_c10d import _world as distributed_world

    coalescing: Any = (
        distributed_world.pg_coalesce_state
    )  # by group; the dictionary that torch fills and empties

# What names new process groups. None where torch lacks it: fullshard's collectives then share the
# program's groups.
process_group_name: Any = getattr(dist.distributed_c10d, "_process_group_name", None)

with _to("join collectives of NCCL into one launch"):
    from torch.distributed.distributed_c10d import _coalescing_manager as coalescing_manager

with _to("tell how long collectives wait for a rank"):
    _BackendOptions = torch._C._distributed_c10d.Backend.Options

# DTensors

with _to("make DTensors of shards without communication"):
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# Operators on DTensors that torch leaves to a function, by operator. None where torch lacks it.
_dispatcher: Any = getattr(DTensor, "_op_dispatcher", None)
dtensor_handlers: dict[Any, Callable[..., Any]] | None
dtensor_handlers = getattr(_dispatcher, "_custom_op_handlers", None)

with _to("describe shards of what tensor parallel has cut along the same dim already"):
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

with _to("wait for gradients that tensor parallel has left in flight"):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

# Modules

with _to("leave batch normalisation out of mixed precision, as PyTorch's FSDP1 does"):
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

with _to("find the tensors in a module's inputs and outputs, whatever contains them"):
    from torch.utils import _pytree as pytree

with _to("see every operator that a construction calls"):
    from torch.utils._python_dispatch import TorchDispatchMode

with _to("mark a module as composed, so that other composable APIs recognise it"):
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
    from torch.distributed._composable.contract import _get_registry as registry_of

with _to("show libraries which module is sharded around theirs"):
    from torch.distributed import _composable_state as _states

# By module that a composable API was applied to, what returns its state. A dictionary that nobody else
# looks into where torch lacks it.
module_states: Any = getattr(_states, "_module_state_mapping", weakref.WeakKeyDictionary())

with _to("see through wrappers for activation checkpointing"):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

# The forward of a module that defines none. None where torch lacks it: such a module then counts as
# one with a forward, which is sharded all the same.
forward_unimplemented: Any = getattr(nn.modules.module, "_forward_unimplemented", None)

# Sharded state dicts of FSDP1

with _to("read and write sharded state dicts of `FullyShardedDataParallel`"):
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
    from torch.distributed.remote_device import _remote_device as RemoteDevice


class Attribute(NamedTuple):
    """A private attribute of a torch object, used where that object is.

    owner: who has it: a class, a module, or an instance where the class does not show it.
    purpose: what fullshard uses it for. otherwise: what happens without it; if that is empty,
        fullshard cannot run.
    """

    owner: Any
    name: str
    purpose: str
    otherwise: str = ""

    @property
    def path(self) -> str:
        owner = self.owner
        named = owner if hasattr(owner, "__name__") else type(owner)
        return f"{named.__name__}.{self.name}"


_A_MODULE = nn.Module()  # has what the class does not show

ATTRIBUTES = (
    # Operators on many tensors in one call
    Attribute(torch, "_chunk_cat", "pack gradients for a reduce-scatter in one kernel"),
    Attribute(torch, "_foreach_copy_", "copy many tensors in one call"),
    Attribute(torch, "_foreach_div_", "divide many gradients in one call"),
    Attribute(torch, "_foreach_lerp_", "move many averages towards values in one call"),
    Attribute(torch, "_foreach_mul_", "scale many gradients in one call"),
    Attribute(torch, "_foreach_norm", "take the norms of many gradients in one call"),
    Attribute(torch, "_foreach_zero_", "fill padding of many tensors in one call"),
    # Modules
    Attribute(_A_MODULE, "_parameters", "find and replace the parameters that a module registers"),
    Attribute(_A_MODULE, "_buffers", "find and replace the buffers that a module registers"),
    Attribute(_A_MODULE, "_modules", "show which modules were sharded together, as PyTorch does"),
    Attribute(nn.Module, "_apply", "follow `model.to`, `model.half` and the like"),
    Attribute(nn.Module, "_call_impl", "recognise the frame that runs a forward"),
    Attribute(nn.Module, "_register_state_dict_hook", "make FSDP1's state dicts"),
    Attribute(nn.Module, "_register_load_state_dict_pre_hook", "load FSDP1's state dicts"),
    Attribute(nn.Module, "_save_to_state_dict", "warn of modules that save more in their own way"),
    Attribute(nn.Module(), "_non_persistent_buffers_set", "leave buffers out of checkpoints"),
    # Tensors
    Attribute(torch.Tensor, "_backward_hooks", "move a parameter's hooks to its other form"),
    Attribute(
        torch.Tensor, "_post_accumulate_grad_hooks", "call hooks where gradients are complete"
    ),
    Attribute(torch.Tensor, "_base", "find the node that a view's gradient passes"),
    Attribute(torch.Tensor, "_is_view", "mark outputs that are views, which may change in place"),
    Attribute(torch.Tensor, "_version", "see writes to shards by their version counters"),
    Attribute(torch.Tensor, "_indices", "count a sparse tensor's memory"),
    Attribute(torch.Tensor, "_values", "count a sparse tensor's memory"),
    Attribute(
        torch.Tensor,
        "_has_grad_dtype_override",
        "tell a `grad_dtype` that was set from the default",
        otherwise="one that differs from the parameter's dtype was set",
    ),
    Attribute(
        nn.Parameter,
        "_in_backward_optimizers",
        "step those that `_apply_optimizer_in_backward` has put on a parameter",
        otherwise="none was put there",
    ),
    Attribute(DTensor, "_local_tensor", "reach a DTensor's shard outside of autograd"),
    Attribute(DTensor, "_spec", "reach a DTensor's mesh, placements and shape"),
    Attribute(torch.UntypedStorage, "_cdata", "tell memory by its address"),
    Attribute(
        torch._ops.OpOverload,
        "_schema",
        "tell what an operator writes to",
        otherwise="each has one: its constructor sets it",
    ),
    Attribute(torch.UntypedStorage, "_share_cuda_", "show a GPU's memory to the host's processes"),
    Attribute(torch.UntypedStorage, "_new_shared_cuda", "open another process' memory on a GPU"),
    Attribute(
        ShardedTensor,
        "_init_from_local_shards_and_global_metadata",
        "make a ShardedTensor without communication",
    ),
    Attribute(
        ShardedTensor,
        "_process_group",
        "read a ShardedTensor that other ranks hold",
        otherwise="each has one: its constructor sets it",
    ),
    # Meshes and process groups
    Attribute(DeviceMesh, "_concatenate", "put data-parallel axes in front of a DTensor's own"),
    Attribute(DeviceMesh, "_get_root_mesh", "tell which mesh a mesh was sliced from"),
    Attribute(DeviceMesh, "_flatten", "join the mesh dims that `dp_mesh_dims` names together"),
    Attribute(dist.ProcessGroup, "_device_types", "tell which devices' bytes a group moves"),
    Attribute(
        dist.ProcessGroup,
        "_get_sequence_number_for_group",
        "tell who has issued fewer collectives, where ranks wait for each other",
        otherwise="only fullshard's own collectives are counted",
    ),
    Attribute(dist.ProcessGroup, "_get_backend", "ask a group's backend itself, such as its name"),
    Attribute(
        dist.ProcessGroup,
        "_allgather_base",
        "call the group's own all-gather",
        otherwise="`all_gather_single`, its newer name",
    ),
    Attribute(
        dist.ProcessGroup,
        "_reduce_scatter_base",
        "call the group's own reduce-scatter",
        otherwise="`reduce_scatter_single`, its newer name",
    ),
    Attribute(_BackendOptions, "_timeout", "tell how long collectives wait for a rank"),
    # Others
    Attribute(
        torch.autograd.profiler, "_is_profiler_enabled", "put labels where a profiler shows them"
    ),
    Attribute(
        ActivationWrapper,
        "_checkpoint_wrapped_module",
        "see through wrappers for activation checkpointing",
        otherwise="each has one: its constructor sets it",
    ),
    Attribute(torch.amp.GradScaler, "_unscale_grads_", "agree on non-finite gradients over ranks"),
    Attribute(
        torch.optim.AdamW,
        "_init_group",
        "make an optimizer's state without a step",
        otherwise="a step with zero gradients on a copy makes it",
    ),
)


def check_attributes() -> None:
    """Raise ImportError for the first attribute that is needed and that torch lacks."""
    for each in ATTRIBUTES:
        if not each.otherwise and not hasattr(each.owner, each.name):
            raise _lacking(f"there is no {each.path}", each.purpose)


check_attributes()
