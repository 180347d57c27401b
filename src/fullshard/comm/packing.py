"""How parameters lie in what collectives move, and copying them in and out.

What is packed travels rank by rank: a *region* holds every rank's packed shards, one rank's after
the other's. Making views of it costs more than copying a small parameter, and they are the same
from step to step, so small regions are kept, lent again, and keep their views.
"""

import weakref
from collections.abc import Sequence

import torch

from fullshard.plan.layout import BucketLayout, ParamLayout

Views = list[torch.Tensor]

# Above it copying costs more than making views, and keeping memory costs too much.
_POOLED_NBYTES = 1 << 20


class Region:
    """1-D memory of ``shard_size`` equal parts, with views of the parameters in it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.kind = (memory.numel(), memory.dtype)
        self.is_pooled = memory.numel() * memory.itemsize <= _POOLED_NBYTES
        self._places: dict[tuple[object, bool], list[Views]] = {}
        self._sources: dict[object, Views] = {}
        self._matrices: dict[int, torch.Tensor] = {}

    def places(self, bucket: BucketLayout, *, packed_only: bool = True) -> list[Views]:
        """Return, a parameter at a time, where its shards lie: part by part as in `shard_parts`.

        A parameter of equal shards has one place, a matrix with a row for each of them. Ranks'
        parts may be longer than the bucket needs. Buckets that are alike have the same places.
        """
        key = (bucket.geometry, packed_only)
        places = self._places.get(key)
        if places is None:
            places = self._places[key] = _places(bucket, self.memory, packed_only=packed_only)
        return places

    def sources(self, bucket: BucketLayout) -> Views:
        """Return the places of all packed parameters, run by run."""
        sources = self._sources.get(bucket.geometry)
        if sources is None:
            stride = self.memory.numel() // bucket.shard_size
            sources = self._sources[bucket.geometry] = [
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

    def rows(self, num_rows: int) -> torch.Tensor:
        """Return the memory as a matrix with a row for each part."""
        matrix = self._matrices.get(num_rows)
        if matrix is None:
            matrix = self._matrices[num_rows] = self.memory.view(num_rows, -1)
        return matrix


class Regions:
    """Lends regions: ``take`` one, and ``give`` it back once nothing reads it any more.

    Lent again in the order of one lane, so that no event is needed between its users.
    """

    def __init__(self, device: torch.device, purpose: str) -> None:
        self.purpose = purpose
        self._device = device
        self._free: dict[tuple[int, torch.dtype], list[Region]] = {}

    @property
    def free(self) -> list[torch.Tensor]:
        """What is kept and not lent."""
        return [region.memory for free in list(self._free.values()) for region in list(free)]

    @staticmethod
    def of(device: torch.device, purpose: str) -> "Regions":
        """Return the device's regions for one purpose, which is what one lane does.

        The same for all models, while the communication of one of them lives.
        """
        regions = _regions.get((device, purpose))
        if regions is None:
            regions = _regions.setdefault((device, purpose), Regions(device, purpose))
        return regions

    def take(self, numel: int, dtype: torch.dtype) -> Region:
        free = self._free.get((numel, dtype))
        if free:
            try:
                return free.pop()
            except IndexError:  # another rank of this process, as a thread, was faster
                pass
        with torch.inference_mode(False):
            # Zeros, since padding travels too and may be summed.
            return Region(torch.zeros(numel, dtype=dtype, device=self._device))

    def give(self, region: Region) -> None:
        if region.is_pooled:
            self._free.setdefault(region.kind, []).append(region)


_regions: "weakref.WeakValueDictionary[tuple[torch.device, str], Regions]"
_regions = weakref.WeakValueDictionary()


class Landing:
    """Where gathered parameters belong in an unsharded buffer: views that are made once.

    first: the element of the unsharded buffer at which ``unsharded`` begins.
    flat: this rank's shard buffer, if shards lie in one piece.
    direct: where each direct parameter belongs, 1-D; none if they are read in place. Of a flat
        bucket, all of it.
    sent: what this rank sends (see `sent_parts`), None if it has to be cast or moved first.
    """

    def __init__(
        self,
        bucket: BucketLayout,
        unsharded: torch.Tensor,
        first: int,
        flat: torch.Tensor | None = None,
    ) -> None:
        self.unsharded = unsharded
        self.sent: Views | None = None
        if flat is not None and (flat.dtype, flat.device) == (unsharded.dtype, unsharded.device):
            self.sent = sent_parts(bucket, flat)
        self._bucket = bucket
        self.direct: Views = []
        self._packed: Views = []  # parts of each run of packed parameters
        if bucket.is_flat:
            self.direct.append(unsharded)
            return
        for param in () if first else bucket.direct:
            self.direct.append(unsharded.narrow(0, param.unsharded_offset, param.spec.numel))
        for run in bucket.packed_runs:
            self._packed += shard_parts(run, unsharded, offset=run[0].unsharded_offset - first)

    @property
    def views(self) -> Views:
        """All views that it made of the unsharded buffer."""
        return [each for each in (*self.direct, *self._packed) if each is not self.unsharded]

    def copy_out(self, region: Region) -> None:
        """Copy every packed parameter from the region of all ranks to where it belongs."""
        if self._packed:
            torch._foreach_copy_(self._packed, region.sources(self._bucket))


def sent_parts(bucket: BucketLayout, flat: torch.Tensor) -> Views:
    """Cut a shard buffer into what travels apart: each direct parameter, and the packed ones."""
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
    """Copy gradients, divided by ``divisor``, into a rank-major region; None becomes zeros.

    region: each rank's shard buffer after the other, or only what is packed of it. It may have
    more columns than that, but for a flat bucket, whose padding is set to zero.
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
    if region.is_pooled and bucket.is_gapless and _copy_in_at_once(bucket, grads, region, start):
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
            sources.append(full.view(num_shards, -1))
        else:
            sources.extend(shard_parts((param,), full))
    if targets:
        torch._foreach_copy_(targets, sources)
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
    """Return the packed parameters' gradients rank by rank, each with ``num_extra`` elements.

    Of a flat bucket, all gradients.
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
    if grad is None:
        return torch.zeros(param.spec.numel, dtype=dtype, device=device)
    wire = grad.contiguous().view(-1).to(dtype)
    return wire if divisor == 1.0 else wire / divisor


def _copy_in_at_once(
    bucket: BucketLayout, grads: Sequence[torch.Tensor | None], region: Region, start: int
) -> bool:
    """Fill a small region by one operation, if it holds these gradients and nothing else.

    start: the first of the bucket's parameters whose gradients these are.
    """
    numel, dtype = region.kind
    if numel != bucket.shard_size * (bucket.packed_numel if start else bucket.shard_numel):
        return False
    sources = [grad for grad in grads if grad is not None and grad.dtype is dtype]
    if len(sources) < len(grads):
        return False
    torch._chunk_cat(sources, 0, bucket.shard_size, out=region.rows(bucket.shard_size))
    return True


def _places(bucket: BucketLayout, region: torch.Tensor, *, packed_only: bool) -> list[Views]:
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
    """Split parameters that lie alike into all shards of full size, and the shorter last ones.

    run: one parameter, or some of `BucketLayout.packed_runs`.
    full: contiguous, of any shape; from element ``offset`` on it holds the first parameter, and the
        others at their distances in the unsharded buffer.
    """
    param = run[0]
    if param.spec.numel == 0:
        return []
    outer, rows, inner = param.outer_numel, param.rows_per_shard, param.inner_numel
    num_rows = param.spec.shape[param.spec.shard_dim]
    whole, rest = divmod(num_rows, rows)
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
    """Return where `shard_parts` lie, part by part, in a rank-major region.

    region: 1-D; rank r's shard of the first parameter begins at ``offset + r * stride``.
    """
    param = run[0]
    if param.spec.numel == 0:
        return []
    base = region.storage_offset() + offset
    outer, rows, inner = param.outer_numel, param.rows_per_shard, param.inner_numel
    whole, rest = divmod(param.spec.shape[param.spec.shard_dim], rows)
    step = run[-1].shard_offset - run[-2].shard_offset if len(run) > 1 else 0
    shape = whole, len(run), outer, rows, inner
    places = [region.as_strided(shape, (stride, step, rows * inner, inner, 1), base)]
    if rest:
        base += whole * stride
        strides = step, rest * inner, inner, 1
        places.append(region.as_strided((len(run), outer, rest, inner), strides, base))
    return places
