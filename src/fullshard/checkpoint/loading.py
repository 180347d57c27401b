"""Loading: every rank reads the boxes that it holds, from whichever files contain them.

First everything is compared: names, shapes and dtypes of what the ranks hold with the manifest. What
does not fit is refused on all ranks together, before a value is changed. Then tensors are read straight
into the model's memory.
"""

import dataclasses
import difflib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.content import (
    RNG,
    Models,
    Optimizers,
    held_by,
    named,
    section_names,
    set_random_states,
)
from fullshard.checkpoint.folder import has_manifest
from fullshard.checkpoint.optimizer_state import Destination, check_trained, kind_of, trained_by
from fullshard.checkpoint.peers import Peers
from fullshard.checkpoint.reading import Reader, Wanted
from fullshard.checkpoint.saving import finish_background
from fullshard.checkpoint.values import decoded, encoded, tensor_names
from fullshard.errors import CheckpointError
from fullshard.plan.boxes import whole_box
from fullshard.state.holdings import Holding, tensor_holding

ALLOWED = ("missing", "unexpected", "dtype")
_MOST_LISTED = 10


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """What a load has done.

    step, metadata: as they were saved. extra: by key, the values that were saved; what has
    ``load_state_dict()`` was loaded. num_tensors: that were read, of the model and of the optimizer.
    left_out: names of tensors of the checkpoint that nothing took, and of the model that it lacks,
    where that was allowed. notes: what else a reader of a log should know.
    """

    path: Path
    step: int | None
    metadata: dict[str, Any]
    extra: dict[str, Any]
    num_tensors: int
    nbytes: int
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


def load_checkpoint(
    path: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers = None,
    *,
    extra: Mapping[str, Any] | None = None,
    rng: bool = True,
    allow: Collection[str] | str = (),
) -> LoadedCheckpoint:
    """Load what `save_checkpoint` has saved, on any number of ranks and sharded in any way. Collective.

        loaded = load_checkpoint("runs/a/step-100", model, optimizer, extra={"scheduler": scheduler})

    Without an optimizer, only the model is loaded. extra: objects with ``load_state_dict()`` are given
    what was saved under their key; other values are only returned. rng: continue the random generators.
    allow: what is not to be an error:

        "missing"     the model has tensors that the checkpoint lacks; they stay as they are
        "unexpected"  the checkpoint has tensors of the model's or optimizer's that nothing takes
        "dtype"       tensors of another dtype are converted

    Raises CheckpointError, on all ranks, for a checkpoint that is not complete, is damaged or does not
    fit. What does not fit is found before anything is changed. If reading fails later, the values of the
    model and the optimizer are no longer those of before.
    """
    allow = (allow,) if isinstance(allow, str) else tuple(allow)
    unknown = set(allow) - set(ALLOWED)
    if unknown:
        raise CheckpointError(f"allow: {sorted(unknown)} is not known. Use {', '.join(ALLOWED)}.")
    finish_background()
    peers = Peers()
    peers.check_alike(
        rng=rng,
        allow=sorted(allow),
        model=section_names(model, "model"),
        optimizer=section_names(optimizer, "optimizer"),
    )
    reader = peers.together(lambda: _opened(Path(path)))
    with reader:
        _check_same_file(reader, reader.folder, peers)
        load = _Load(reader, frozenset(allow), peers)
        with torch.inference_mode(False):  # else optimizer state would be of no use for training
            return load.run(model, optimizer, extra or {}, rng=rng)


def _opened(folder: Path) -> Reader:
    if not has_manifest(folder):
        why = (
            "has no manifest, so no save was completed there" if folder.is_dir() else "is no folder"
        )
        raise CheckpointError(
            f"{folder}: {why}. Name a complete checkpoint, on a filesystem that all hosts share."
        )
    return Reader(folder)


def _check_same_file(reader: Reader, folder: Path, peers: Peers) -> None:
    digests = peers.gathered(reader.digest)
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise CheckpointError(
            f"{folder}: ranks {others} see another checkpoint there than rank 0. Load from a filesystem "
            "that all hosts share."
        )


class _Load:
    """One load: plans what is read where, reads it, and hands on what is no tensor."""

    def __init__(self, reader: Reader, allow: frozenset[str], peers: Peers) -> None:
        self._reader = reader
        self._tensors = reader.manifest.tensors
        self._values = reader.manifest.values
        self._allow = allow
        self._peers = peers
        self._by_name = {
            name: first
            for first, tensor in self._tensors.items()
            for name in (first, *tensor.aliases)
        }
        self._notes: list[str] = []
        self._left_out: set[str] = set()

    def run(
        self, models: Models, optimizers: Optimizers, extra: Mapping[str, Any], *, rng: bool
    ) -> LoadedCheckpoint:
        by_section = named(models, "model")
        opts = named(optimizers, "optimizer")

        def plan() -> tuple[list[Holding], dict[str, Destination], list[str]]:
            return self._plan(by_section, opts, extra)

        holdings, destinations, problems = self._peers.together(plan)
        self._refuse(problems)
        nbytes = self._peers.together(lambda: self._read(holdings))
        values = self._peers.together(lambda: self._hand_on(destinations, extra, rng=rng))
        return LoadedCheckpoint(
            self._reader.folder,
            self._values.get("step"),
            self._decoded(self._values.get("metadata", {})),
            values,
            len(holdings),
            nbytes,
            tuple(sorted(self._left_out)),
            tuple(self._notes),
        )

    # What fits

    def _plan(
        self, models: Mapping[str, Any], optimizers: Mapping[str, Any], extra: Mapping[str, Any]
    ) -> tuple[list[Holding], dict[str, Destination], list[str]]:
        holdings = held_by(models)
        found: list[Holding] = []
        shared, by_rank = self._values.get("extra", {}), self._values.get("extra_by_rank", {})
        problems = [f"missing extra/{key}" for key in extra if key not in {**shared, **by_rank}]
        taken: set[str] = set()
        for holding in holdings:
            names = [self._by_name[n] for n in holding.names if n in self._by_name]
            taken.update(names)
            if not names:
                problems.append(f"missing {holding.name}")
                continue
            if len(set(names)) > 1:
                problems.append(f"untied {' and '.join(dict.fromkeys(names))}")
                continue
            found.append(dataclasses.replace(holding, names=(names[0],)))
        trained = trained_by([*models.values()])
        destinations = {}
        for section, optimizer in optimizers.items():
            check_trained(optimizer, trained)
            destination, own_problems = self._destination(section, optimizer, trained)
            destinations[section] = destination
            problems += own_problems
            found += destination.holdings.values()
            taken.update(h.name for h in destination.holdings.values())
        for holding in found:
            saved = self._tensors[holding.name]
            if saved.shape != holding.shape:
                problems.append(
                    f"mismatched {holding.name}: {saved.shape} in the checkpoint, {holding.shape} here"
                )
            elif saved.dtype != holding.dtype:
                problems.append(
                    f"dtype {holding.name}: {saved.dtype} in the checkpoint, {holding.dtype} here"
                )
        sections = (*models, *optimizers)
        present = {name.partition("/")[0] for name in self._tensors}
        for name in self._tensors:
            section = name.partition("/")[0]
            if section in sections and name not in taken:
                problems.append(f"unexpected {name}")
        for section in sections:
            if section not in present and section not in self._values.get("optimizers", {}):
                problems.append(f"missing {section}")
        for section in sorted(present - {*sections, "extra"}):
            self._notes.append(f"{section} is in the checkpoint and was not asked for")
        fitting = {p.partition(" ")[2].partition(":")[0] for p in problems if p.startswith("mis")}
        return [h for h in found if h.name not in fitting], destinations, problems

    def _destination(
        self, section: str, optimizer: Any, trained: Mapping[Any, Any]
    ) -> tuple[Destination, list[str]]:
        prefix = f"{section}/"
        saved = {}
        for name, tensor in self._tensors.items():
            if name.startswith(prefix):
                parameter, _, key = name[len(prefix) :].rpartition("/")
                saved[parameter, key] = (tensor.shape, tensor.dtype)
        values = self._values.get("optimizers", {}).get(section)
        problems = []
        if values is not None and values.get("class") != kind_of(optimizer):
            kinds = f"{values.get('class')} in the checkpoint, {kind_of(optimizer)} here"
            return Destination(optimizer, trained, {}, prefix), [f"class {section}: {kinds}"]
        if values is not None:
            options = {n: g["options"] for g in values["groups"] for n in g["params"]}
            for group in optimizer.param_groups:
                names = [name for p in group["params"] for name in trained[p].names]
                problems += [f"missing {prefix}{name}" for name in names if name not in options]
                if len({repr(options[name]) for name in names if name in options}) > 1:
                    problems.append(f"groups {section}: {names[0]} and others of its group")
        destination = Destination(optimizer, trained, saved, prefix)
        return destination, [*problems, *destination.problems]

    def _refuse(self, problems: Sequence[str]) -> None:
        """Raise CheckpointError, on all ranks alike, for what does not fit and is not allowed."""
        everyones = self._peers.gathered(list(problems))
        groups: dict[str, list[str]] = {}
        for problem in dict.fromkeys(p for own in everyones for p in own):
            kind, _, text = problem.partition(" ")
            groups.setdefault(kind, []).append(text)
        # What one rank does not take, another may: pipeline stages.
        by_none = set.intersection(*(set(own) for own in everyones))
        if "unexpected" in groups:
            groups["unexpected"] = [
                text for text in groups["unexpected"] if f"unexpected {text}" in by_none
            ]
        self._left_out.update(groups.get("missing", ()), groups.get("unexpected", ()))
        refused = {k: v for k, v in groups.items() if v and k not in self._allow}
        if refused:
            raise CheckpointError(_described(self._reader.folder, refused))

    # Reading

    @torch.no_grad()
    def _read(self, holdings: Sequence[Holding]) -> int:
        """Read what this rank holds into its memory; return the number of bytes."""
        wanted = [Wanted(h.name, box, view) for h in holdings for box, view in h.boxes]
        self._reader.read(wanted)
        for holding in holdings:
            if holding.after_loading is not None:
                holding.after_loading()
            for _, view in holding.boxes:
                # Bytes were written past autograd, whose counters tell others that values are new.
                first = view.reshape(-1)[:1]
                first.copy_(first.clone())
        return sum(each.view.numel() * each.view.itemsize for each in wanted)

    def _tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor of the checkpoint, in host memory."""
        saved = self._tensors.get(name)
        if saved is None:
            raise CheckpointError(
                f"{self._reader.folder}: has no tensor {name}, which a value names."
            )
        result = torch.empty(saved.shape, dtype=saved.dtype)
        if result.numel():
            self._reader.read([Wanted(name, whole_box(saved.shape), result)])
        return result

    # Values

    def _decoded(self, tree: Any, tensor: Callable[[str], torch.Tensor] | None = None) -> Any:
        try:
            return decoded(tree, tensor or self._tensor)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{self._reader.folder}: a value in the manifest is of no known form ({error!r})."
            ) from error

    def _hand_on(
        self, destinations: Mapping[str, Destination], extra: Mapping[str, Any], *, rng: bool
    ) -> dict[str, Any]:
        for section, destination in destinations.items():
            values = self._values.get("optimizers", {}).get(section)
            if values is not None:
                destination.assign(
                    decoded(values["scalars"], self._tensor),
                    decoded(values["groups"], self._tensor),
                )
        shared, by_rank = self._values.get("extra", {}), self._values.get("extra_by_rank", {})
        found: dict[str, Any] = {}
        for key in (*shared, *by_rank):
            if key == RNG:
                continue
            target = extra.get(key)
            if target is not None and hasattr(target, "load_state_dict"):
                target.load_state_dict(self._extra(key, target))
            else:
                found[key] = self._extra(key, None)
        if rng:
            self._restore_random_states()
        return found

    def _extra(self, key: str, target: Any) -> Any:
        tree = self._values.get("extra", {}).get(key)
        if tree is None and key not in self._values.get("extra", {}):
            own = self._values["extra_by_rank"][key]
            if str(self._peers.rank) not in own or len(own) != self._peers.size:
                if target is None:
                    return [self._decoded(each) for each in own.values()]
                raise CheckpointError(
                    f"extra {key!r} was saved separately by {len(own)} ranks, and these are "
                    f"{self._peers.size}. Leave it out of extra=: it is returned as a list then, one "
                    "state a rank, for you to divide."
                )
            tree = own[str(self._peers.rank)]
        templates: dict[str, torch.Tensor] = {}
        if target is not None and any(
            _is_sharded(self._tensors.get(n)) for n in tensor_names(tree)
        ):
            encoded(target.state_dict(), f"extra/{key}", templates.__setitem__)

        def tensor(name: str) -> torch.Tensor:
            template = templates.get(name)
            if template is None or not hasattr(template, "device_mesh"):
                return self._tensor(name)
            holding = tensor_holding(name, template)
            self._reader.read([Wanted(name, box, view) for box, view in holding.boxes])
            return template

        return self._decoded(tree, tensor)

    def _restore_random_states(self) -> None:
        shared, by_rank = self._values.get("extra", {}), self._values.get("extra_by_rank", {})
        if RNG in shared:
            set_random_states(self._decoded(shared[RNG]))
            return
        states = by_rank.get(RNG)
        if states is None:
            self._notes.append("the checkpoint has no states of random generators")
            return
        own = states.get(str(self._peers.rank))
        if own is not None:
            set_random_states(self._decoded(own))
            return
        # A rank more than saved: it begins a sequence of its own, the same in every such load.
        set_random_states(self._decoded(states["0"]))
        rank = self._peers.rank
        seeds = torch.randint(2**31, (rank + 1,))
        torch.manual_seed(int(seeds[rank]))
        self._notes.append(f"rank {rank} has new random generators: fewer ranks saved")


def _is_sharded(tensor: Any) -> bool:
    return tensor is not None and tensor.placement not in ("", "replicated", "buffer")


def _described(folder: Path, groups: Mapping[str, Sequence[str]]) -> str:
    titles = {
        "missing": 'The model has, and the checkpoint lacks (allow=["missing"] leaves them as they are)',
        "unexpected": 'The checkpoint has, and nothing takes (allow=["unexpected"] leaves them out)',
        "mismatched": "Of another shape",
        "dtype": 'Of another dtype (allow=["dtype"] converts)',
        "untied": "One tensor in the model, and several in the checkpoint",
        "groups": "Parameters with different options in the checkpoint, and in one group here",
        "flat": "Without the state that others of the same flat parameter have (wrap with "
        "use_orig_params=True, which keeps them apart)",
        "class": "State of another optimizer",
    }
    lines = [f"{folder}: does not fit."]
    for kind, texts in groups.items():
        lines.append(f"  {titles[kind]}: {len(texts)}")
        lines += [f"    {text}" for text in texts[:_MOST_LISTED]]
        if len(texts) > _MOST_LISTED:
            lines.append(f"    ... and {len(texts) - _MOST_LISTED} more")
    renamed = _renames(groups.get("missing", ()), groups.get("unexpected", ()))
    if renamed:
        lines.append("  Perhaps renamed:")
        lines += [f"    {old} -> {new}" for old, new in renamed[:_MOST_LISTED]]
    lines.append("Load the checkpoint of this model, or say in allow= what may differ.")
    return "\n".join(lines)


def _renames(missing: Sequence[str], unexpected: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    for name in missing[: 5 * _MOST_LISTED]:
        close = difflib.get_close_matches(name, unexpected, n=1, cutoff=0.7)
        found += [(old, name) for old in close]
    return found
