"""Copying parameters and gradients into and out of the memory that collectives move.

Packed parameters travel rank by rank: a *region* holds every rank's packed shards, all of rank 0
first, then all of rank 1, and so on. Making views of a region costs more than copying a small
parameter, and the views are the same in every step. So small regions are pooled with their views.
"""

import itertools
import operator
import threading
import weakref
from collections.abc import Sequence

import torch

from fullshard.plan.layout import BucketLayout, ParamLayout
from fullshard.plan.ways import POOLED_NBYTES, choose_block, region_numel

Views = list[torch.Tensor]
_dtype = operator.attrgetter("dtype")


class Region:
    """1-D memory of one equal part per rank, with views of the parameters in it.

    kind: number of elements and dtype, by which regions are pooled.
    known_sources: what `sources` has made, by the bucket's geometry.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.kind = (memory.numel(), memory.dtype)
        self.is_pooled = memory.numel() * memory.itemsize <= POOLED_NBYTES
        self._places: dict[tuple[object, bool], list[Views]] = {}
        self.known_sources: dict[object, Views] = {}

    def places(self, bucket: BucketLayout, *, packed_only: bool = True) -> list[Views]:
        """Return for each parameter the views of the region that hold its shards.

        A parameter of equal shards has one view, a matrix with one row per shard. Others have the
        views of `shard_places`. Ranks' parts may be longer than the bucket needs.
        """
        # Equal buckets, such as those of a model's blocks, have equal views.
        key = (bucket.geometry, packed_only)
        places = self._places.get(key)
        if places is None:
            places = self._places[key] = _places(bucket, self.memory, packed_only=packed_only)
        return places

    def sources(self, bucket: BucketLayout) -> Views:
        """Make, and keep in ``known_sources``, the views of all packed parameters, run by run, as `Landing` copies them out."""
        stride = self.memory.numel() // bucket.shard_size
        sources = self.known_sources[bucket.geometry] = [
            place
            for run in bucket.packed_runs
            for place in shard_places(
                run,
                self.memory,
                offset=run[0].shard_offset - bucket.packed_offset,
                stride=stride,
            )
        ]
        return sources


class Regions:
    """A pool of regions: ``take`` one, and ``give`` it back once nothing reads it any more.

    A pool serves one lane (stream) of one device. Users of a region follow each other on that lane,
    so it may be given back while work on it is still queued, and needs no event.
    """

    def __init__(self, device: torch.device, purpose: str) -> None:
        self.purpose = purpose
        self._device = device
        self._free: dict[tuple[int, torch.dtype], list[Region]] = {}

    @property
    def free(self) -> list[torch.Tensor]:
        """Memory in the pool that nobody has taken."""
        # Copies, since ranks may be threads that take and give meanwhile.
        return [region.memory for free in list(self._free.values()) for region in list(free)]

    @staticmethod
    def of(device: torch.device, purpose: str) -> "Regions":
        """Return the device's pool for one purpose ("gather" or "reduce"; each has its lane).

        All models share it. It lives as long as the communication of one of them.
        """
        regions = _regions.get((device, purpose))
        if regions is None:
            regions = _regions.setdefault((device, purpose), Regions(device, purpose))
        return regions

    def take(self, numel: int, dtype: torch.dtype) -> Region:
        """Return a region of this size. It holds what its last user left there, or zeros."""
        try:
            return self._free[numel, dtype].pop()
        except KeyError:
            self._free.setdefault((numel, dtype), [])
        except IndexError:  # all of them are taken
            pass
        # The region outlives the caller's inference mode, so it must not be an inference tensor.
        with torch.inference_mode(False):
            # Zeros, since padding travels and may be summed: what is uninitialised may be NaN.
            return Region(torch.zeros(numel, dtype=dtype, device=self._device))

    def give(self, region: Region) -> None:
        """Return a region to the pool; a large one is freed instead."""
        if region.is_pooled:
            self._free[region.kind].append(region)


_regions: "weakref.WeakValueDictionary[tuple[torch.device, str], Regions]"
_regions = weakref.WeakValueDictionary()


class Scratch:
    """A pool of 1-D memory: ``take`` some, and ``give`` it back once nothing refers to it.

    On the CPU, an allocator returns large blocks to the system, and getting them back costs a page
    fault per page: more than the copy that they are used for. Other devices have caching allocators.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []  # bytes, smallest first
        self._lock = threading.Lock()  # ranks may be threads

    @staticmethod
    def of(device: torch.device) -> "Scratch":
        """Return the device's pool. All models share it, and it ends with the last of them."""
        scratch = _scratch.get(device)
        return _scratch.setdefault(device, Scratch(device)) if scratch is None else scratch

    @property
    def free(self) -> list[torch.Tensor]:
        """Memory in the pool that nobody has taken."""
        with self._lock:
            return list(self._free)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory: part of the smallest free block that is large enough."""
        if self._device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=self._device)  # a caching allocator
        nbytes = numel * dtype.itemsize
        with self._lock:
            position = choose_block(map(torch.Tensor.numel, self._free), nbytes)
            if position is not None:
                return self._free.pop(position)[:nbytes].view(dtype)
            if self._free:
                # None is large enough. The largest is freed, since the new one serves its uses too.
                self._free.pop()
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu").view(dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Return what `take` returned, itself or a view with elements.

        An empty view is ignored, and its block lost to the pool, so give back all that was taken.
        """
        if self._device.type == "cpu" and tensor.numel():
            storage = tensor.untyped_storage()
            with self._lock:
                self._free.append(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
                self._free.sort(key=torch.Tensor.numel)


# Weak: units and their communication hold the pool. With the last of them its memory is freed.
_scratch: "weakref.WeakValueDictionary[torch.device, Scratch]" = weakref.WeakValueDictionary()


class Landing:
    """Views of where gathered parameters belong in an unsharded buffer, made once per buffer.

    offset: the element of the bucket's unsharded buffer at which ``unsharded`` begins.
    flat: this rank's shard buffer, if shards lie in one piece.
    direct: one 1-D view per direct parameter; empty if direct parameters are read in place. For a
        flat bucket: the whole buffer.
    sent: what this rank sends (see `sent_parts`); None if it has to be cast or moved first.
    nbytes: how many bytes arrive, this rank's among them.
    region_numel: elements of the region in which packed parameters arrive; 0 if there are none.
    """

    def __init__(
        self,
        bucket: BucketLayout,
        unsharded: torch.Tensor,
        offset: int,
        flat: torch.Tensor | None = None,
    ) -> None:
        self.unsharded = unsharded
        self.sent: Views | None = None
        if flat is not None and (flat.dtype, flat.device) == (unsharded.dtype, unsharded.device):
            self.sent = sent_parts(bucket, flat)
        self._bucket, self._geometry = bucket, bucket.geometry
        self.nbytes = bucket.unsharded_numel * unsharded.itemsize
        self.region_numel = region_numel(bucket)
        self.direct: Views = []
        self._packed: Views = []  # parts of each run of packed parameters
        if bucket.is_flat:
            self.direct.append(unsharded)
            return
        # With `offset`, the buffer begins behind the direct parameters, which are read in place.
        for param in () if offset else bucket.direct:
            self.direct.append(unsharded.narrow(0, param.unsharded_offset, param.spec.numel))
        for run in bucket.packed_runs:
            self._packed += shard_parts(run, unsharded, offset=run[0].unsharded_offset - offset)

    @property
    def views(self) -> Views:
        """All views made of the unsharded buffer, without the buffer itself."""
        return [each for each in (*self.direct, *self._packed) if each is not self.unsharded]

    def copy_out(self, region: Region, pool: Regions | None = None) -> tuple[bool, ...]:
        """Copy every packed parameter from a region of all ranks' shards to where it belongs.

        pool: gets the region then: whoever takes it next uses it on the same lane. Returns what `Work.wait` does.
        """
        if self._packed:
            sources = region.known_sources.get(self._geometry) or region.sources(self._bucket)
            torch._foreach_copy_(self._packed, sources)
        if pool is not None:
            pool.give(region)
        return ()


def sent_parts(bucket: BucketLayout, flat: torch.Tensor) -> Views:
    """Cut a shard buffer into what travels separately.

    One part per direct parameter, then one for all packed ones if there are any; a flat bucket
    travels whole.
    """
    if bucket.is_flat:
        return [flat]
    parts = [flat.narrow(0, param.shard_offset, param.chunk_numel) for param in bucket.direct]
    if bucket.packed_numel:
        parts.append(flat.narrow(0, bucket.packed_offset, bucket.packed_numel))
    return parts


def copy_in_gradients(
    bucket: BucketLayout,
    grads: Sequence[torch.Tensor | None],
    region: Region | torch.Tensor,
    *,
    packed_only: bool = False,
    divisor: float = 1.0,
) -> None:
    """Copy gradients, divided by ``divisor``, into a region; None becomes zeros.

    grads: one full gradient per parameter of the bucket, in order.
    region: one part per rank, arranged as its shard buffer; with ``packed_only``, as the packed
        end of that buffer. Parts may be longer, except for flat buckets, whose padding is zeroed.
    """
    if bucket.is_flat:
        memory = region.memory if isinstance(region, Region) else region
        _copy_in_flat(bucket, grads, memory, divisor)
        return
    if not isinstance(region, Region):
        region = Region(region)
    start = len(bucket.direct) if packed_only else 0
    if start:
        grads = grads[start:]
    numel, dtype = region.kind
    all_numel = bucket.shard_size * (bucket.packed_numel if start else bucket.shard_numel)
    # By one operation, if all gradients are there, of the region's dtype, and it holds nothing else.
    if region.is_pooled and bucket.is_gapless and numel == all_numel:
        try:
            is_alike = all(map(operator.is_, map(_dtype, grads), itertools.repeat(dtype)))
        except AttributeError:  # None has no dtype
            is_alike = False
        if is_alike:
            # Cuts each gradient into one chunk per rank along dim 0, and puts each rank's chunks
            # together.
            rows = region.memory.view(bucket.shard_size, -1)
            torch._chunk_cat(grads, 0, bucket.shard_size, out=rows)  # type: ignore[arg-type]
            if divisor != 1.0:
                region.memory.div_(divisor)
            return
    all_places = region.places(bucket, packed_only=packed_only)
    targets: Views = []
    sources: Views = []
    missing: Views = []
    for param, grad, places in zip(bucket.params[start:], grads, all_places, strict=True):
        if grad is None:
            missing.extend(places)
            continue
        targets.extend(places)
        full = grad.contiguous()
        if num_shards := param.num_equal_shards:
            # The places of ranks without a row of this parameter are neither read nor written.
            sources.append(full.view(num_shards, -1))
        else:
            sources.extend(shard_parts((param,), full))
    if targets:
        torch._foreach_copy_(targets, sources)
        # In the region, not before the copy: the gradients are not ours to change.
        if divisor != 1.0:
            torch._foreach_div_(targets, divisor)
    if missing:
        torch._foreach_zero_(missing)


def pack_gradients(
    bucket: BucketLayout,
    grads: Sequence[torch.Tensor | None],
    regions: Regions,
    dtype: torch.dtype,
    *,
    divisor: float,
    num_extra: int = 0,
) -> Region:
    """Return a region of the packed parameters' gradients; for a flat bucket, of all gradients.

    num_extra: elements at the end of each rank's part that the caller will fill.
    """
    numel = bucket.shard_numel if bucket.is_flat else bucket.packed_numel
    region = regions.take(bucket.shard_size * (numel + num_extra), dtype)
    copy_in_gradients(bucket, grads, region, packed_only=True, divisor=divisor)
    return region


def wire_gradient(
    param: ParamLayout,
    grad: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    divisor: float,
) -> torch.Tensor:
    """Return a direct parameter's gradient as it travels: 1-D, of this dtype, divided.

    It is the gradient's own memory if nothing has to change, and zeros if there is no gradient.
    """
    if grad is None:
        return torch.zeros(param.spec.numel, dtype=dtype, device=device)
    wire = grad.contiguous().view(-1).to(dtype)
    return wire if divisor == 1.0 else wire / divisor


def _places(bucket: BucketLayout, region: torch.Tensor, *, packed_only: bool) -> list[Views]:
    """Make the views that `Region.places` keeps.

    Viewed as a matrix with one row per rank, a parameter is a range of columns, and its equal
    shards are the first rows of that range. So one split makes the views of all of them.
    """
    start = len(bucket.direct) if packed_only else 0
    first = bucket.packed_offset if packed_only else 0
    matrix = region.view(bucket.shard_size, -1)
    stride = matrix.size(1)
    columns = bucket.columns[2 * start :]
    pieces = matrix.split_with_sizes((*columns, stride - sum(columns)), 1)[:-1:2]
    return [
        [piece[: param.num_equal_shards]]
        if param.num_equal_shards
        else shard_places((param,), region, offset=param.shard_offset - first, stride=stride)
        for param, piece in zip(bucket.params[start:], pieces, strict=True)
    ]


def _copy_in_flat(
    bucket: BucketLayout,
    grads: Sequence[torch.Tensor | None],
    region: torch.Tensor,
    divisor: float,
) -> None:
    """Copy gradients into the unsharded buffer's arrangement; zero missing ones and padding."""
    columns = region.split_with_sizes(bucket.columns)
    pieces, padding = columns[::2], columns[1::2]
    found = [(piece, grad) for piece, grad in zip(pieces, grads, strict=True) if grad is not None]
    if found:
        torch._foreach_copy_([piece for piece, _ in found], [grad.reshape(-1) for _, grad in found])
        if divisor != 1.0:
            torch._foreach_div_([piece for piece, _ in found], divisor)
    missing = [piece for piece, grad in zip(pieces, grads, strict=True) if grad is None]
    blank = [part for part in (*missing, *padding) if part.numel()]
    if blank:
        torch._foreach_zero_(blank)


def shard_parts(run: Sequence[ParamLayout], full: torch.Tensor, *, offset: int = 0) -> Views:
    """Return views of the shards of a run of parameters: those of full size, then the shorter one.

    With ``rows`` rows per rank the first view has shape (full shards, parameters, outer, rows,
    inner), where outer and inner are the elements before and after the shard dimension. The second
    view, if the rows do not divide, is the last shard of all parameters: (parameters, outer,
    remaining rows, inner).

    run: one parameter, or one of `BucketLayout.packed_runs` (see `plan.layout`, Note: Runs).
    full: contiguous, of any shape; from element ``offset`` on it holds the first parameter, and the
        others at their distances in the unsharded buffer.
    """
    param = run[0]
    if param.spec.numel == 0:
        return []
    outer, rows, inner = param.outer_numel, param.rows_per_shard, param.inner_numel
    num_rows = param.spec.shape[param.spec.shard_dim]
    whole, rest = divmod(num_rows, rows)
    # Members of a run are equally far apart, so one stride leads from each to the next.
    step = run[-1].unsharded_offset - run[-2].unsharded_offset if len(run) > 1 else 0
    stride, base = num_rows * inner, full.storage_offset() + offset
    shape = whole, len(run), outer, rows, inner
    parts = [full.as_strided(shape, (rows * inner, step, stride, inner, 1), base)]
    if rest:
        base += whole * rows * inner
        parts.append(
            full.as_strided((len(run), outer, rest, inner), (step, stride, inner, 1), base)
        )
    return parts


def shard_places(
    run: Sequence[ParamLayout], region: torch.Tensor, *, offset: int, stride: int
) -> Views:
    """Return views of a region with the shapes of `shard_parts`, in the same order.

    region: 1-D; rank r's shard of the run's first parameter begins at ``offset + r * stride``.
    """
    param = run[0]
    if param.spec.numel == 0:
        return []
    base = region.storage_offset() + offset
    outer, rows, inner = param.outer_numel, param.rows_per_shard, param.inner_numel
    whole, rest = divmod(param.spec.shape[param.spec.shard_dim], rows)
    # Members of a run are equally far apart in the region too.
    step = run[-1].shard_offset - run[-2].shard_offset if len(run) > 1 else 0
    shape = whole, len(run), outer, rows, inner
    places = [region.as_strided(shape, (stride, step, rows * inner, inner, 1), base)]
    if rest:
        base += whole * stride
        strides = step, rest * inner, inner, 1
        places.append(region.as_strided((len(run), outer, rest, inner), strides, base))
    return places
