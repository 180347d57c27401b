"""One implementation that trains one Llama on one device: what `bench.gpu` starts as a process."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
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

from .gpu_settings import Entry, Setting
from .overlap import count_launches, overlap_of
from .ranks import Rank

DeviceType = Literal["cuda", "cpu"]


class Turn(NamedTuple):
    """What a few steps took: a step in all, and until the host was free again; the peak memory."""

    step_ms: float
    host_ms: float
    peak_mb: float
    losses: list[float]


class Traced(NamedTuple):
    """What a trace of one step showed; see `overlap.count_launches` and `overlap.overlap_of`."""

    counts: dict[str, int]
    overlap: str


Wrap = Callable[[Llama, Setting, Entry, torch.device], nn.Module]


def _unwrapped(model: Llama, _setting: Setting, _entry: Entry, _device: torch.device) -> nn.Module:
    return model


def _fully_shard(library: Any) -> Wrap:
    def apply(model: Llama, setting: Setting, entry: Entry, device: torch.device) -> nn.Module:
        options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (1,))}
        if setting.compute_dtype is not None:
            options["mp_policy"] = library.MixedPrecisionPolicy(
                setting.compute_dtype, torch.float32
            )
        if entry.offload == "all":
            pin_memory = device.type == "cuda"
            options["offload_policy"] = library.CPUOffloadPolicy(pin_memory=pin_memory)
        for layer in model.model.layers:
            library.fully_shard(layer, **options)
        library.fully_shard(model, **options)
        return model

    return apply


def _wrapper(library: Any) -> Wrap:
    def apply(model: Llama, setting: Setting, _entry: Entry, device: torch.device) -> nn.Module:
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


IMPLEMENTATIONS: dict[str, Wrap] = {
    "unwrapped": _unwrapped,
    "fsdp2": _fully_shard(fsdp),
    "fsdp1": _wrapper(fsdp),
    "fullshard": _fully_shard(fullshard),
    "fullshard-fsdp1": _wrapper(_Fullshard),
}


class GpuTraining:
    """A model, its optimizer and its data on one device."""

    def __init__(self, rank: Rank, entry: Entry, setting: Setting, device_type: DeviceType) -> None:
        self._setting = setting
        self._device = (
            torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
        )
        if self._is_cuda:
            torch.cuda.set_device(self._device)
            # Attention without a fused kernel is an error, and no number.
            torch.backends.cuda.enable_math_sdp(False)
            if entry.offload == "all":
                torch.set_num_threads(os.cpu_count() or 1)
        if entry.is_sharded:
            store = dist.TCPStore("127.0.0.1", rank.store_port, is_master=False)
            backend = "nccl" if self._is_cuda else "gloo"
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        model = _build(setting, torch.device("cpu") if entry.offload == "all" else self._device)
        if setting.fp8:
            _convert_to_float8(model, entry, emulate=not self._is_cuda)
        model.recompute_layers(setting.recompute)
        if setting.compiler is not None:
            for layer in model.model.layers:
                layer.compile(backend=setting.compiler)
        self._model = IMPLEMENTATIONS[entry.implementation](model, setting, entry, self._device)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=1e-4,
            fused=True,
            capturable=setting.captured and self._is_cuda,
        )
        if entry.offload == "optimizer":
            _stream_state(self._optimizer)
        self._is_autocast = setting.compute_dtype is not None and not entry.is_sharded
        self._scales_weights = setting.fp8 and entry.is_sharded
        self._train = self._step
        self._peak_mb = 0.0
        self._num_batches = 0

    def run(self, num_steps: int) -> Turn:
        """Train a few steps, then give cached memory back to whoever is next."""
        batches = [self._batch() for _ in range(num_steps)]
        self._synchronize()
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses = [self._train(batch) for batch in batches]
        host = time.perf_counter() - start
        self._synchronize()
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() / 1e6 if self._is_cuda else 0.0
        values = [float(loss) for loss in losses]
        losses.clear()
        if self._is_cuda:
            torch.cuda.empty_cache()
        peak = max(peak, self._peak_mb)
        return Turn(1e3 * seconds / num_steps, 1e3 * host / num_steps, peak, values)

    def capture(self, num_steps: int) -> list[float]:
        """Train a few steps, return their losses, and capture the next one: from then on it is replayed.

        Without a GPU there is nothing to capture, and later steps are as these.
        """
        if not self._is_cuda:
            return self.run(num_steps).losses
        torch.cuda.reset_peak_memory_stats()
        # Everything before on a stream of its own: what autograd keeps would wait for the usual one.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            losses = [self._step(self._batch()) for _ in range(num_steps)]
        torch.cuda.current_stream().wait_stream(stream)
        tokens = self._batch()
        self._num_batches -= 1  # nothing is trained while it is captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._step(tokens)

        def replay(batch: Tensor) -> Tensor:
            tokens.copy_(batch)
            graph.replay()
            return loss.clone()

        self._train = replay
        # Replays allocate nothing: the peak is that of the capture.
        self._peak_mb = torch.cuda.max_memory_allocated() / 1e6
        return [float(each) for each in losses]

    def trace(self, path: Path | None) -> Traced:
        """Profile a step, say what was launched and what overlapped, and keep the device's part as a chrome trace."""
        self._train(self._batch())
        batch = self._batch()
        self._synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._is_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            with torch.profiler.record_function(_STEP):
                self._train(batch)
            self._synchronize()
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(whole))
            trace = json.loads(whole.read_text())
        if path is not None:
            on_device = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
            kept = [
                e for e in trace["traceEvents"] if e.get("ph") == "M" or e.get("cat") in on_device
            ]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(json.dumps({"traceEvents": kept}).encode()))
        counts = count_launches(trace, during=_STEP)._asdict()
        overlap = overlap_of(trace)
        if self._is_cuda:
            torch.cuda.empty_cache()
        return Traced(counts, str(overlap) if overlap.copy_ms else "")

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"

    def _step(self, tokens: Tensor) -> Tensor:
        with self._autocast():
            logits = self._model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._scales_weights:
            _scale_weights(self._model)
        return loss.detach()

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if not self._is_autocast:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._setting.compute_dtype)

    def _batch(self) -> Tensor:
        generator = torch.Generator().manual_seed(self._num_batches)
        self._num_batches += 1
        shape = (self._setting.sequences, self._setting.tokens + 1)
        tokens = torch.randint(self._setting.config.vocab_size, shape, generator=generator)
        return tokens.to(self._device)

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()


_STEP = "bench.gpu step"


def build_training(
    rank: Rank, *, entry: Entry, setting: Setting, device_type: DeviceType
) -> GpuTraining:
    return GpuTraining(rank, entry, setting, device_type)


def _stream_state(optimizer: torch.optim.Optimizer) -> None:
    """Keep the optimizer's state on the host, streamed through the device in each step."""
    fullshard.stream_state(optimizer, fullshard.PlacementPolicy(optimizer="host"))


def _convert_to_float8(model: Llama, entry: Entry, *, emulate: bool) -> None:
    """Let the layers' linear modules multiply in float8; sharded ones also gather their weights so."""
    from torchao.float8 import (  # noqa: PLC0415 - optional, and one setting's
        Float8LinearConfig,
        convert_to_float8_training,
    )

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=entry.is_sharded, emulate=emulate)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _module, name: name != "lm_head"
    )


def _scale_weights(model: nn.Module) -> None:
    """Compute the scales of all weights at once, before they are gathered."""
    from torchao.float8 import (  # noqa: PLC0415 - as above
        precompute_float8_dynamic_scale_for_fsdp,
    )

    precompute_float8_dynamic_scale_for_fsdp(model)


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
