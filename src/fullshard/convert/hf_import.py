"""Loading safetensors files into a model that is sharded already: every rank reads its own parts."""

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from fullshard.checkpoint.fit import (
    check_allowed,
    check_fits,
    check_room,
    listed,
    other_shape,
)
from fullshard.checkpoint.folder import disk_path
from fullshard.checkpoint.peers import Peers
from fullshard.checkpoint.read import Wanted
from fullshard.checkpoint.save import finish_background
from fullshard.convert.hf_files import SECTION, Weights, WeightsReader, weights_of
from fullshard.convert.hf_names import (
    by_new_name,
    computed_names,
    is_wide_float,
    plain_name,
    prefix_hint,
)
from fullshard.convert.opening import read_box
from fullshard.plan.units import Rename
from fullshard.state.holdings import Holding, holdings_of, tell_loaded
from fullshard.state.host_memory import bytes_of

ALLOWED = ("missing", "unexpected", "memory")


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What a load has done.

    num_tensors: of the model that were loaded. nbytes: that this rank has read from files.
    missing: names of the model's tensors that the files lack, and that stayed as they were.
    unexpected: names in the files that nothing took.
    """

    path: Path
    num_tensors: int
    nbytes: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_hf(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    rename: Rename = None,
    allow: Collection[str] | str = (),
) -> LoadedWeights:
    """Load the weights of a Hugging Face folder, of which each rank reads its own parts. Collective.

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        ...                                        # fully_shard(layer) for each layer, then the model
        model.to_empty(device="cpu")
        load_hf(model, "downloads/llama")

    path: a folder with ``model.safetensors``, with an index, or with any ``*.safetensors``; or one file.
    model: sharded in any way or not at all. Its dtypes stay: floating-point values are converted.
    rename: from names in the files to names in the model: a function, or a mapping of names, and of
        beginnings of names that end with a dot ("" is the beginning of all); None leaves out.
    allow: what is not to be an error: "missing" (the model has tensors that the files lack; they stay as
        they are), "unexpected" (the files have tensors that nothing takes), "memory" (the hosts seem to have
        too little memory).

    Of a tied parameter the files need one of the names. Non-persistent buffers are not loaded, nor
    computed: after ``to_empty`` they hold no values (docs/huggingface.md).

    Raises CheckpointError, on all ranks, for files that are damaged or do not fit. What does not fit is
    found before anything is changed.
    """
    finish_background()
    peers = Peers(call="load_hf")
    mapping = sorted(rename.items()) if isinstance(rename, Mapping) else callable(rename)
    alike = {"path": str(path), "allow": listed(allow), "rename": mapping}
    allowed = peers.together(lambda: check_allowed(allow, ALLOWED), alike=alike)
    source_path = peers.together(lambda: disk_path(path, "load_hf"))
    weights = peers.of_first(lambda: weights_of(source_path))
    with (
        WeightsReader(source_path, weights) as reader,
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        if not allowed & {"missing", "memory"}:  # what is missing is not written to
            check_room(peers, weights.source, lambda: ([model], (), 0))

        plan, problems = peers.together_telling(lambda: _plan(model, weights, reader, rename))
        differing = check_fits(
            weights.source, "folder", problems, allowed, advice=_ADVICE, hints=prefix_hint
        )

        def read() -> int:
            counts: list[int] = []
            reader.read(plan.wanted, counts.append)
            tell_loaded(plan.holdings)
            return sum(counts)

        return LoadedWeights(
            source_path,
            len(plan.holdings),
            peers.together(read),
            tuple(differing.get("missing", ())),
            tuple(differing.get("unexpected", ())),
        )


_ADVICE = "Load the weights of this model, give rename=, or say in allow= what may differ."


class _Plan(NamedTuple):
    """What this rank loads: holdings, and their boxes by names in the files."""

    holdings: list[Holding]
    wanted: list[Wanted]


def _plan(
    model: nn.Module, weights: Weights, reader: WeightsReader, rename: Rename
) -> tuple[_Plan, list[str]]:
    """Return what this rank loads, and what does not fit."""
    in_files = by_new_name(weights.tensors, rename)
    plan, problems = _Plan([], []), []
    taken = computed_names(model)
    for holding in holdings_of(model, writes="load_hf"):
        names = [name for name in map(plain_name, holding.names) if name in in_files]
        taken.update(names)
        found = [in_files[name] for name in names]
        faults = [fault for name in found if (fault := _fault(name, weights, holding))]
        if not names:
            faults = [f"missing {plain_name(holding.name)}"]
        elif not faults and not _are_equal(found, holding, reader):
            faults = [f"untied {' and '.join(names)}"]
        problems += faults
        if not faults:
            plan.holdings.append(holding)
            plan.wanted.extend(
                Wanted(f"{SECTION}{found[0]}", box, view) for box, view in holding.boxes
            )
    return plan, problems + [f"unexpected {name}" for name in in_files if name not in taken]


def _fault(name: str, weights: Weights, holding: Holding) -> str | None:
    """Say why a tensor of the files does not fit, or return None."""
    entry = weights.tensors[name]
    if entry.shape != holding.shape:
        return other_shape(name, entry.shape, holding.shape, "file")
    dtype = entry.dtype
    if dtype != holding.dtype and not (is_wide_float(dtype) and is_wide_float(holding.dtype)):
        return f"kind {name}: {dtype} in the file, {holding.dtype} here"
    return None


def _are_equal(names: Sequence[str], holding: Holding, reader: WeightsReader) -> bool:
    """Whether all names of a tied parameter have the same values in the files, as far as this rank sees."""
    for box, _ in holding.boxes if len(names) > 1 else ():
        first, *others = (read_box(reader, f"{SECTION}{name}", box) for name in names)
        for other in others:
            if first.dtype != other.dtype or bytes_of(first) != bytes_of(other):
                return False
    return True
