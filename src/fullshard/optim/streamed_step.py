"""`stream_state` keeps optimizer state on the host or on disk, and steps on it on the device, unit by unit.

[Note: Streamed state] Compute's order is that of an ordinary step: when ``step()`` returns, all that compute
is given sees the new parameters. Only the bytes of states move beside it:

    backward      the states of the first units arrive: as many as there are slots, and more where backward has
                  freed memory since it began
    step()        unit by unit: compute waits for the arrival, steps, and goes on; the state leaves
    next forward  the last ones leave. Slots beyond the two that stay are given back while it runs, since
                  activations need the room

Between steps ``optimizer.state`` has the memory at home. Whoever reads it waits for what is on its way, and what had
arrived early is dropped, since it may be written to.
"""

import collections
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn, optim

from fullshard.engine.observer import PassWatcher, watchers
from fullshard.engine.params.managed import owner_of
from fullshard.engine.runtime import Runtime, eager
from fullshard.engine.unit import Unit
from fullshard.errors import ShardingError
from fullshard.optim.local_form import State
from fullshard.optim.local_step import Inner, LocalStep, own_step, references
from fullshard.optim.state_memory import Home, Layout, Slot, is_moved, padded
from fullshard.optim.unit_files import UnitFile, UnitFiles
from fullshard.plan.state_placement import NUM_SLOTS, least_budget, plan_state
from fullshard.policies import PlacementPolicy
from fullshard.process_hooks import return_free_heap
from fullshard.torch_private import local_part

_NUM_TRIED = 8  # elements of a parameter on which a step is tried out


class Piece:
    """What one optimizer trains of one unit; what is of no unit makes one piece.

    members: for each of the optimizer's groups, by number, the local tensors that it trains here.
    states: for those that are trained, who owns it, its elements, and the bytes for each of them in each tensor of state,
        as a trial has shown. stays: it does not leave the device.
    home: where the state is between steps; None as long as there is none, and if it stays.
    reserved: a file for the home to come, so that a disk which is too small is found before anything is stepped.
    """

    def __init__(self, unit: Unit | None, policy: PlacementPolicy, runtime: Runtime) -> None:
        self.unit = _nobody if unit is None else weakref.ref(unit)
        self.policy, self.runtime = policy, runtime
        self.members: dict[int, list[torch.Tensor]] = collections.defaultdict(list)
        self.states: list[tuple[Any, int, tuple[int, ...]]] = []
        self.stays = True
        self.home: Home | None = None
        self.reserved: UnitFile | None = None

    @property
    def path(self) -> str:
        unit = self.unit()
        return "parameters of no unit" if unit is None else unit.path

    @property
    def shards(self) -> Iterator[torch.Tensor]:
        for shards in self.members.values():
            yield from shards

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the state here."""
        return sum(padded(numel * size) for _, numel, sizes in self.states for size in sizes)

    @property
    def most_nbytes(self) -> int:
        """Bytes of the state on the rank that has most, as every rank finds it by the layout."""
        unit = self.unit()
        if unit is None or unit.flat_parameter is not None:  # which is cut evenly
            return self.nbytes
        buckets = unit.plan_layout().buckets
        places = {unit.managed[place.index]: (b, place) for b in buckets for place in b.params}

        def on(rank: int) -> int:
            total = 0
            for owner, numel, sizes in self.states:
                if owner in places:
                    bucket, place = places[owner]
                    numel = math.prod(bucket.shard_range(place, rank)[1])  # noqa: PLW2901
                total += sum(padded(numel * size) for size in sizes)
            return total

        # Of rows, no rank has more than the first.
        ranks = max((bucket.shard_size for bucket in buckets if bucket.is_flat), default=1)
        return max(map(on, range(ranks)))

    @property
    def is_stepped(self) -> bool:
        """True if a step finds a gradient."""
        return any(shard.grad is not None for shard in self.shards)


class _Channel:
    """The slots of one device through which states of one policy pass.

    files: of states on disk; None of those on the host.
    """

    def __init__(self, runtime: Runtime, policy: PlacementPolicy, nbytes: int) -> None:
        self._runtime, self._policy, self._nbytes = runtime, policy, nbytes
        self.files = None
        if policy.folder is not None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            self.files = UnitFiles(Path(policy.folder), rank=rank)
        self.free: collections.deque[Slot] = (
            collections.deque()
        )  # the one that was used first, first
        self._num_made = 0

    def take(self, nbytes: int) -> Slot | None:
        """Return one of the slots that stay; None if all are taken."""
        if not self.free and self._num_made == NUM_SLOTS:
            return None
        if not self.free:
            self._num_made += 1
        slot = self.free.popleft() if self.free else self.extra(max(nbytes, self._nbytes))
        if (
            slot.nbytes < nbytes
        ):  # an option of the optimizer was changed: it keeps more than it did
            self._nbytes, slot = nbytes, self.extra(nbytes)
        return slot

    def extra(self, nbytes: int) -> Slot:
        """Return a slot beside those that stay."""
        return Slot(nbytes, self._runtime, self.files, pins=self._policy.pin_memory)

    def give_back(self, slot: Slot) -> None:
        """Take back one of the slots that stay."""
        self.free.append(slot)


class StreamedStep(LocalStep):
    """Steps unit by unit, on states that come and go. See [Note: Streamed state].

    policy: of all that is trained; None takes each unit's own.
    """

    def __init__(self, optimizer: optim.Optimizer, policy: PlacementPolicy | None = None) -> None:
        super().__init__(optimizer)
        self.policy = policy
        self.pieces: list[Piece] = []
        self._planned: list[list[torch.Tensor]] | None = None  # the lists that the pieces are of
        self._channels: dict[tuple[torch.device, PlacementPolicy], _Channel] = {}
        # States that arrive, or have arrived, before their step; whether their slot is one that stays.
        self._early: dict[Piece, tuple[Slot, bool]] = {}
        self._leaving: list[
            Slot
        ] = []  # slots beside those that stay, given back in the next forward
        self._was_shown = True  # somebody may have written to the state since the last step
        self._is_exposed = (
            False  # somebody keeps parts of the state, and may read and write them at any time
        )
        self.units: weakref.WeakSet[Unit] = weakref.WeakSet()  # whose states come and go
        self._passes = _Passes(self)
        weakref.finalize(self, self._passes.stop)

    # Planning

    def plan(self) -> None:
        """Plan where states are, unless that is known. Moves nothing.

        Raises ShardingError for a budget that is too small, for a folder that cannot be written to, and for
        state that cannot be moved; AllocationError for a disk with too little space.
        """
        self._find_parameters()
        if self._planned is self._local_lists:
            return
        pieces = self._divided()
        groups: dict[tuple[torch.device, PlacementPolicy], list[Piece]] = {}
        for piece in pieces:
            place, runtime = piece.policy.optimizer, piece.runtime
            if piece.states and (place == "disk" or (place == "host" and runtime.has_streams)):
                groups.setdefault((runtime.device, piece.policy), []).append(piece)
        homes = [piece for piece in self.pieces if piece.home is not None]
        at_home = set(itertools.chain.from_iterable(piece.shards for piece in homes))
        channels = {}
        for (device, policy), own in groups.items():
            self._check_budget(own, policy.device_nbytes)
            here = [piece for piece in own if piece.nbytes]
            planned = plan_state([piece.nbytes for piece in here], policy.device_nbytes)
            channel = _Channel(Runtime.of(device), policy, planned.slot_nbytes)
            for piece, stays in zip(here, planned.stays, strict=True):
                piece.stays = stays
                # What has a file already moves to another one at a time: reserved at once, they take twice the space.
                if channel.files is not None and not stays and at_home.isdisjoint(piece.shards):
                    piece.reserved = channel.files.create(piece.path, piece.nbytes)
            channels[device, policy] = channel
        self._come_home()
        self.pieces, self._channels, self._planned = pieces, channels, self._local_lists
        self._was_shown = True
        self.units.clear()
        for piece in pieces:
            if (unit := piece.unit()) is not None:
                unit.state_place = (piece.nbytes, self._place_of(piece)) if piece.nbytes else None
                if not piece.stays:
                    self.units.add(unit)
        if channels:
            self._passes.start()

    def _check_budget(self, pieces: Sequence[Piece], budget: int | None) -> None:
        """Raise ShardingError, on all ranks alike, for a budget that is too small on some."""
        if budget is None:
            return
        sizes = [piece.most_nbytes for piece in pieces]
        if budget < (least := least_budget(sizes)):
            raise ShardingError(
                f"PlacementPolicy(device_nbytes={budget:,}) is too small: units' states pass through twice the memory of "
                f"the largest that leaves, and the largest has {max(sizes):,} bytes, on the rank that has most of it. "
                f"It takes device_nbytes={least:,} or more."
            )

    def _divided(self) -> list[Piece]:
        """Divide what is trained into pieces, by unit, in the order of the groups."""
        pieces: dict[Any, Piece] = {}
        sizes: dict[Any, tuple[int, ...]] = {}
        for number, (shown, local) in enumerate(
            zip(self._shown_lists, self._local_lists, strict=True)
        ):
            for parameter, shard in zip(shown, local, strict=True):
                owner = owner_of(parameter)  # type: ignore[arg-type]
                unit = None if owner is None else cast(Unit | None, owner.unit())
                key = unit, shard.device
                if key not in pieces:
                    said = None if unit is None else unit.config.offload_policy
                    policy = self.policy or (said if isinstance(said, PlacementPolicy) else None)
                    pieces[key] = Piece(unit, policy or PlacementPolicy(), Runtime.of(shard.device))
                piece = pieces[key]
                piece.members[number].append(shard)
                if piece.policy.optimizer == "device" or not parameter.requires_grad:
                    continue
                kind = number, shard.dtype, shard.device
                if kind not in sizes:
                    sizes[kind] = self._try_out(number, shard)
                if sizes[kind]:
                    piece.states.append((owner, shard.numel(), sizes[kind]))
        return list(pieces.values())

    @torch.no_grad()
    def _try_out(self, number: int, shard: torch.Tensor) -> tuple[int, ...]:
        """Return the bytes per element of each tensor of a parameter's state, by a step on a few elements."""
        optimizer = self._optimizer()
        assert optimizer is not None
        kind = getattr(type(optimizer), "_original_class", type(optimizer))
        copy = object.__new__(kind)
        own = {
            key: value
            for key, value in vars(optimizer).items()
            if key not in ("step", "_local_step")
        }
        vars(copy).update(own, state=collections.defaultdict(dict))
        stand_in = nn.Parameter(torch.zeros(_NUM_TRIED, dtype=shard.dtype, device=shard.device))
        stand_in.grad = torch.zeros_like(stand_in)
        copy.param_groups = [{**self._groups()[number], "params": [stand_in]}]
        kept = _Kept(optimizer)
        own_step(kind)(copy)
        kept.put_back()  # tensors in which it counts are its copy's as well
        sizes = []
        for key, value in copy.state[stand_in].items():
            if is_moved(value) and value.numel() == _NUM_TRIED:
                sizes.append(value.dtype.itemsize)
            elif isinstance(value, torch.Tensor) and value.dim() > 0:
                raise ShardingError(
                    f"{kind.__name__} keeps {key!r} as a {type(value).__name__} of shape {tuple(value.shape)} for "
                    f"{_NUM_TRIED} elements. State that leaves the device has to be plain tensors of the parameter's shape."
                )
        return tuple(sizes)

    def _place_of(self, piece: Piece) -> str:
        if piece.stays:
            return "device"
        files = self._channel(piece).files
        return "host" if files is None else f"disk ({files.folder}, {files.how})"

    def _channel(self, piece: Piece) -> _Channel:
        return self._channels[piece.runtime.device, piece.policy]

    # State

    def shown_state(self) -> State:
        self._come_home()
        return super().shown_state()

    def memory(self) -> Iterator[tuple[Any, torch.Tensor]]:
        homes = [piece.home for piece in self.pieces if piece.home is not None]
        on_disk = {id(value) for home in homes if home.file is not None for value in home.values}
        for parameter, value in super().memory():
            if id(value) not in on_disk:
                yield parameter, value
        slots = [slot for channel in self._channels.values() for slot in channel.free]
        slots += [slot for slot, _ in self._early.values()] + self._leaving
        for slot in slots:
            yield from ((None, memory) for memory in slot.tensors)

    def device_of_state(self, parameter: torch.Tensor) -> torch.device:
        self.plan()
        shard = local_part(parameter)
        leaves = any(
            shard is each for piece in self.pieces if not piece.stays for each in piece.shards
        )
        return torch.device("cpu") if leaves else shard.device

    def enter(self) -> None:
        self._was_shown |= self._is_exposed or "state" in self._attributes()
        super().enter()

    def leave(self) -> None:
        is_shown = self._still_shown is not None
        nobody = references([[]])
        # Each value at home is in its list, and in the state.
        self._is_exposed = is_shown or any(
            references(piece.home.values) > nobody + 1
            for piece in self.pieces
            if piece.home is not None
        )
        if self._is_exposed:
            self._come_home()
        super().leave()

    def _come_home(self) -> None:
        """Let the host wait until all states are at home, and drop those that have come early."""
        for slot, _ in self._early.values():
            slot.finish_arrival()  # which reads what is about to be written
        self._drop_early(self._early.keys())
        for piece in self.pieces:
            if piece.home is not None:
                piece.home.finish(piece.runtime)

    def _drop_early(self, pieces: Any) -> None:
        for piece in tuple(pieces):
            slot, stays = self._early.pop(piece)
            if stays:
                self._channel(piece).give_back(slot)

    @torch.no_grad()
    def _move(self, piece: Piece) -> None:
        """Bring a state to where it belongs that something else has made: a first step, a load, a user.

        [Note: Held state] What somebody else refers to goes on to be the state, as it does with any optimizer: in
        the memory that it has, until nobody refers to it any more. And what is no state any more is not written to.
        """
        state, home = self._state, piece.home
        if piece.stays:
            for shard in piece.shards:
                own = state.get(shard, {})
                for key, value in own.items():
                    if is_moved(value) and value.device != shard.device:
                        own[key] = value.to(shard.device)
            return
        if home is not None and home.is_in(state):
            home.follow_writes()
            return
        former = [] if home is None else home.values
        if _is_held(piece, state, former):
            piece.home = None
            return
        present = {id(value) for value in _moved(piece, state)}
        old = [value for value in former if id(value) not in present]
        is_free = references(old) <= references([[]]) + 1  # in the list of the home alone
        if home is None or not is_free or not home.layout.describes(state):
            layout = Layout(piece.shards, state)
            if not layout.entries:
                piece.home = None
                return
            files, file = self._channel(piece).files, piece.reserved
            piece.reserved = None
            if files is not None and (file is None or file.nbytes != layout.nbytes):
                del file  # which gives its space back
                file = files.create(piece.path, layout.nbytes)
            home = Home(layout, files, file, pins=piece.policy.pin_memory)
        else:
            home.finish(piece.runtime)
        if home.file is None:
            home.layout.fill(home.memory, state)
            # Compute has copied, and so frees, what was on the device.
            home.left = piece.runtime.record()
        else:
            slot, stays = self._slot(piece, home)
            slot.finish_writing()
            home.layout.fill(slot.memory, state)
            slot.begin_leaving(home)
            if stays:
                self._channel(piece).give_back(slot)
        piece.home = home
        home.show(state)

    def _slot(self, piece: Piece, home: Home) -> tuple[Slot, bool]:
        """Return a slot for a state that is made here, and whether it is one that stays."""
        channel, nbytes = self._channel(piece), home.layout.nbytes
        slot = channel.take(nbytes)
        return (slot, True) if slot is not None else (channel.extra(nbytes), False)

    # Steps

    @eager
    def step(self, inner: Inner, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.plan()
        self.enter()
        kept = _Kept(optimizer)
        run = functools.partial(_run, functools.partial(inner, optimizer, **options), kept)
        try:
            self._step(run)
        finally:
            kept.give_parameters(kept.parameters)
            self.leave()
        return loss

    def _step(self, run: Callable[[Sequence[Piece]], None]) -> None:
        pieces = [piece for piece in self.pieces if piece.is_stepped]
        if self._was_shown:
            self._come_home()  # `load_state_dict` puts in another state without reading this one
            for piece in self.pieces:
                self._move(piece)
            self._was_shown = False
        # Slots that are taken by states that no step needs would be missing.
        self._drop_early(self._early.keys() - set(pieces))
        moving = sorted(
            (piece for piece in pieces if piece.home is not None),
            key=lambda piece: piece not in self._early,
        )
        waiting = collections.deque(piece for piece in moving if piece not in self._early)
        self._fetch(waiting)
        at_rest = [piece for piece in pieces if piece.home is None]
        before, has_left = list(self._state), False
        run([piece for piece in at_rest if piece.stays])  # while the first ones arrive
        for piece in (
            piece for piece in at_rest if not piece.stays
        ):  # a first step, or [Note: Held state]
            kept = self._bring(piece)
            try:
                run([piece])
            finally:
                self._take_back(kept)
            self._move(piece)
            has_left |= piece.home is not None and not piece.runtime.has_streams
        for piece in moving:
            home = piece.home
            assert home is not None
            slot, stays = self._early.pop(piece)
            slot.arrive(home)
            here = home.layout.views(slot.memory)
            for entry, view in zip(home.layout.entries, here, strict=True):
                self._state[entry.shard][entry.key] = view
            try:
                run([piece])
            finally:
                self._send_home(piece, slot, here)
                if stays:
                    self._channel(piece).give_back(slot)
                else:
                    self._leaving.append(slot)
            self._fetch(waiting)
        if len(self._state) > len(before):
            self._put_in_order(before)
        if has_left:  # memory of the host, for files
            return_free_heap()

    def _put_in_order(self, before: Sequence[Any]) -> None:
        """Let new keys of the state follow those of before in the order of the groups, as an ordinary step makes them."""
        own = dict(self._state)
        shards = itertools.chain.from_iterable(self._local_lists)
        ordered = dict.fromkeys(key for key in itertools.chain(before, shards, own) if key in own)
        self._state.clear()
        self._state.update((key, own[key]) for key in ordered)

    def _fetch(self, waiting: collections.deque[Piece]) -> None:
        """Start to bring states to slots that are free, in this order."""
        while waiting:
            home = waiting[0].home
            assert home is not None
            slot = self._channel(waiting[0]).take(home.layout.nbytes)
            if slot is None:
                return
            slot.begin_arrival(home)
            self._early[waiting.popleft()] = slot, True

    @torch.no_grad()
    def _bring(self, piece: Piece) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
        """Put copies into a state of what is not where it is stepped on. Returns where, and what was there."""
        kept = []
        for shard in piece.shards:
            own = self._state.get(shard, {})
            for key, value in own.items():
                if is_moved(value) and value.device != shard.device:
                    kept.append((own, key, value))
                    own[key] = value.to(shard.device)
        return kept

    @torch.no_grad()
    def _take_back(self, kept: list[tuple[dict[str, Any], str, torch.Tensor]]) -> None:
        """Copy what was stepped on to where it was, and make that the state again."""
        while kept:
            own, key, value = kept.pop()
            value.copy_(own[key])
            own[key] = value

    @torch.no_grad()
    def _send_home(self, piece: Piece, slot: Slot, here: Sequence[torch.Tensor]) -> None:
        """Start to bring a state home that was stepped on in a slot. here: its tensors there."""
        home, state = piece.home, self._state
        assert home is not None
        is_complete = home.layout.describes(state)
        _put_back(home, here, state)
        slot.begin_leaving(home)
        if not is_complete:  # it has other tensors since this step
            home.finish(piece.runtime)
            self._move(piece)

    # Beside passes

    def fetch_early(self, unit: Unit, room: int) -> None:
        """Start to bring states for the coming step. room: bytes of device memory that may be taken for it."""
        # After an accumulating backward comes a forward, which needs the room.
        if not unit.config.reduce_grads or self._is_exposed or "state" in self._attributes():
            return
        for piece in self.pieces:
            home = piece.home
            if home is None or piece in self._early:
                continue
            channel, nbytes = self._channel(piece), home.layout.nbytes
            slot, stays = channel.take(nbytes), True
            if slot is None and channel.files is None and nbytes <= room:
                slot, stays, room = channel.extra(nbytes), False, room - nbytes
            if slot is None:
                return
            slot.begin_arrival(home)
            self._early[piece] = slot, stays

    def give_back(self, share: float) -> None:
        """Give back this share of the slots beside those that stay, and those that no step has used."""
        self._drop_early([piece for piece, (_, stays) in self._early.items() if not stays])
        keep = round(len(self._leaving) * (1.0 - share))
        del self._leaving[: len(self._leaving) - keep]  # compute waits until they are free

    @property
    def has_given_back(self) -> bool:
        return not self._leaving and all(stays for _, stays in self._early.values())


def _put_back(home: Home, here: Sequence[torch.Tensor], state: State) -> None:
    """Make the home's memory that of a state again. here: its tensors in a slot, which have the values then.

    A function of its own: what its variables refer to would count as held.
    """
    for entry, view, value in zip(home.layout.entries, here, home.values, strict=True):
        found = state.get(entry.shard, {}).get(entry.key)
        if is_moved(found) and (found.shape, found.dtype) == (view.shape, view.dtype):
            if found is not view:  # the optimizer has made a new one
                view.copy_(found)
            state[entry.shard][entry.key] = value


def _moved(piece: Piece, state: State) -> list[torch.Tensor]:
    """Return what of a piece's state moves."""
    owns = [state.get(shard, {}) for shard in piece.shards]
    return [value for own in owns for value in own.values() if is_moved(value)]


def _is_held(piece: Piece, state: State, at_home: Sequence[torch.Tensor]) -> bool:
    """Return whether anybody else refers to what moves of a state. at_home: what a list refers to as well."""
    known = {id(value) for value in at_home}
    nobody = references([[]])
    others = [value for value in _moved(piece, state) if id(value) not in known]
    if references(others) > nobody + 1:
        return True
    del others
    return references([v for v in _moved(piece, state) if id(v) in known]) > nobody + 2


class _Passes(PassWatcher):
    """Tells a step what passes of its model do, and when there is room on the device."""

    def __init__(self, step: StreamedStep) -> None:
        self._step = weakref.ref(step)
        self._level = 0  # bytes on the device when backward began
        self._num_begun = 0

    def start(self) -> None:
        if self not in watchers:
            watchers.append(self)

    def stop(self) -> None:
        if self in watchers:
            watchers.remove(self)

    def forward_begins(self, state: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
        step, iteration = self._step(), state.known_iteration
        if step is None or iteration is None or step.units.isdisjoint(iteration.units):
            return
        for piece in step.pieces:
            if not piece.stays:
                piece.runtime.refuse_capture("optimizer state that comes and goes (stream_state)")

    def units_begin(self, units: Sequence[Any]) -> None:
        step = self._step()
        if step is not None and not step.has_given_back:
            self._num_begun += sum(unit in step.units for unit in units)
            step.give_back(min(1.0, self._num_begun / len(step.units)))

    def backward_begins(self, iteration: Any) -> None:
        step = self._step()
        if step is None or step.units.isdisjoint(iteration.units):
            return
        step.give_back(1.0)
        self._num_begun = 0
        self._level = iteration.units[0].runtime.allocated_nbytes or 0

    def gradients_complete(self, unit: Any, grads: Sequence[torch.Tensor | None]) -> None:
        step = self._step()
        if step is not None and unit in step.units:
            step.fetch_early(unit, self._level - (unit.runtime.allocated_nbytes or 0))


class _Kept:
    """What an optimizer keeps beside its state, so that each piece finds in one step what the first one found.

    These are the options of its groups and its own attributes: a counter of steps, say. What is bound to another
    value is bound again, and tensors of one element are written again. After the last piece all stays as that left it.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._parts: list[dict[str, Any]] = [*self._groups, vars(optimizer)]
        self._before = [dict(part) for part in self._parts]
        self.parameters = [group["params"] for group in self._groups]
        values = itertools.chain.from_iterable(part.values() for part in self._before)
        # Not parameters and their kin: what a unit has stepped on stays stepped on.
        self._written = [
            (value, value.detach().clone())
            for value in values
            if type(value) is torch.Tensor and value.numel() == 1
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        for part, before in zip(self._parts, self._before, strict=True):
            part.update(before)
            for name in part.keys() - before.keys():
                del part[name]
        for value, number in self._written:
            value.copy_(number)

    def give_parameters(self, lists: Iterable[list[torch.Tensor]]) -> None:
        for group, params in zip(self._groups, lists, strict=True):
            group["params"] = params


def _run(inner: Callable[[], Any], kept: _Kept, pieces: Sequence[Piece]) -> None:
    """Step on what pieces have."""
    members: dict[int, list[torch.Tensor]] = collections.defaultdict(list)
    for piece in pieces:
        for number, shards in piece.members.items():
            members[number] += shards
    if members:
        kept.put_back()
        kept.give_parameters([members[number] for number in range(len(kept.parameters))])
        inner()


def _nobody() -> None:
    return None
