"""One implementation that trains one Llama on one device: what `bench.gpu` starts as a process."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.models.llama import DecoderLayer, Llama, RotaryEmbedding
from fullshard.models.sizes import LlamaConfig

from .overlap import overlap_of
from .ranks import Rank

DeviceType = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Setting:
    """What is trained and how; the same value goes to every implementation.

    dtype: of the parameters. compute_dtype: of a mixed-precision policy with float32 reductions, or
    None. offload: parameters, gradients and the optimizer in pinned host memory.
    """

    name: str
    config: LlamaConfig
    sequences: int
    tokens: int
    implementations: tuple[str, ...]
    dtype: torch.dtype = torch.bfloat16
    compute_dtype: torch.dtype | None = None
    offload: bool = False
    num_rounds: int = 5
    num_steps: int = 5


class Turn(NamedTuple):
    """What a few steps took: a step in all, and until the host was free again; the peak memory."""

    step_ms: float
    host_ms: float
    peak_mb: float
    losses: list[float]


def _unwrapped(model: Llama, _setting: Setting, _device: torch.device) -> nn.Module:
    return model


def _fully_shard(library: Any) -> Callable[[Llama, Setting, torch.device], nn.Module]:
    def apply(model: Llama, setting: Setting, device: torch.device) -> nn.Module:
        options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (1,))}
        if setting.compute_dtype is not None:
            options["mp_policy"] = library.MixedPrecisionPolicy(
                setting.compute_dtype, torch.float32
            )
        if setting.offload:
            pin_memory = device.type == "cuda"
            options["offload_policy"] = library.CPUOffloadPolicy(pin_memory=pin_memory)
        for layer in model.model.layers:
            library.fully_shard(layer, **options)
        library.fully_shard(model, **options)
        return model

    return apply


def _wrapper(library: Any) -> Callable[[Llama, Setting, torch.device], nn.Module]:
    def apply(model: Llama, setting: Setting, device: torch.device) -> nn.Module:
        mixed = None
        if setting.compute_dtype is not None:
            mixed = library.MixedPrecision(
                param_dtype=setting.compute_dtype, reduce_dtype=torch.float32
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one rank: NO_SHARD
            wrapped: nn.Module = library.FullyShardedDataParallel(
                model,
                auto_wrap_policy=library.wrap.ModuleWrapPolicy({DecoderLayer}),
                mixed_precision=mixed,
                device_id=device,
                use_orig_params=True,
            )
        return wrapped

    return apply


class _Fullshard:
    """Our names where PyTorch has them."""

    class wrap:  # noqa: N801
        ModuleWrapPolicy = fullshard.ModuleWrapPolicy

    MixedPrecision = fullshard.MixedPrecision
    FullyShardedDataParallel = fullshard.FullyShardedDataParallel


IMPLEMENTATIONS: dict[str, Callable[[Llama, Setting, torch.device], nn.Module]] = {
    "unwrapped": _unwrapped,
    "fsdp2": _fully_shard(fsdp),
    "fsdp1": _wrapper(fsdp),
    "fullshard": _fully_shard(fullshard),
    "fullshard-fsdp1": _wrapper(_Fullshard),
}


class GpuTraining:
    """A model, its optimizer and its data on one device."""

    def __init__(
        self, rank: Rank, implementation: str, setting: Setting, device_type: DeviceType
    ) -> None:
        torch.set_num_threads(8 if setting.offload and device_type == "cuda" else 1)
        self._device = (
            torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
        )
        if self._is_cuda:
            torch.cuda.set_device(self._device)
        if implementation != "unwrapped":
            store = dist.TCPStore("127.0.0.1", rank.store_port, is_master=False)
            backend = "nccl" if self._is_cuda else "gloo"
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        self._vocab = setting.config.vocab_size
        on_host = setting.offload and implementation != "unwrapped"
        model = _build(setting, torch.device("cpu") if on_host else self._device)
        self._model = IMPLEMENTATIONS[implementation](model, setting, self._device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, foreach=True)
        self._shape = (setting.sequences, setting.tokens + 1)
        self._num_batches = 0

    def run(self, num_steps: int) -> Turn:
        """Train a few steps, then give cached memory back to whoever is next."""
        batches = [self._batch() for _ in range(num_steps)]
        self._synchronize()
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses = [self._step(batch) for batch in batches]
        host = time.perf_counter() - start
        self._synchronize()
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() / 1e6 if self._is_cuda else 0.0
        values = [float(loss) for loss in losses]
        losses.clear()
        if self._is_cuda:
            torch.cuda.empty_cache()
        return Turn(1e3 * seconds / num_steps, 1e3 * host / num_steps, peak, values)

    def trace(self, path: Path) -> str:
        """Profile a step, write what the device did as a chrome trace, and say what overlapped."""
        self._step(self._batch())
        self._synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._is_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            self._step(self._batch())
            self._synchronize()
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(whole))
            trace = json.loads(whole.read_text())
        on_device = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
        kept = [e for e in trace["traceEvents"] if e.get("ph") == "M" or e.get("cat") in on_device]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": kept}).encode()))
        return str(overlap_of(trace))

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"

    def _step(self, tokens: Tensor) -> Tensor:
        logits = self._model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def _batch(self) -> Tensor:
        generator = torch.Generator().manual_seed(self._num_batches)
        self._num_batches += 1
        return torch.randint(self._vocab, self._shape, generator=generator).to(self._device)

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()


def build_training(
    rank: Rank, *, implementation: str, setting: Setting, device_type: DeviceType
) -> GpuTraining:
    return GpuTraining(rank, implementation, setting, device_type)


def _build(setting: Setting, device: torch.device) -> Llama:
    """Build the model where it is trained, with the same weights for every implementation."""
    torch.manual_seed(0)
    with device:
        model = Llama(setting.config).to(setting.dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02)
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.reset_buffers()
    return model
