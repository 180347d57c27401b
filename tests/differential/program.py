"""How a program is declared, and all that are.

    @program()
    def gan(run): ...                                  # both faces, two ranks, everywhere right

    @program(ranks=4, differs={"fsdp1/torch": "PyTorch's wrapper has no such thing"})
    def expert_parallel(run): ...

A program must show the same on every path as in one process. `differs` says where it need not, by
decision, and `broken` where it does not, to be mended; both name paths as "face/path" with
wildcards and give a reason, and both are checked: a path that agrees after all fails, so that
nothing stays declared that is not so. `skips` names what cannot even be tried (it hangs, or ends
the process), with a reason; `zeros` where gradients that one process lacks may be zeros.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.differential.compare import TOLERANCE

if TYPE_CHECKING:
    from tests.differential.run import Run

# The faces: `fully_shard`, the wrapper with original parameters, the wrapper with flat ones.
FSDP2, ORIG, FLAT = "fsdp2", "orig", "flat"
FACES = (FSDP2, ORIG)
ALL_FACES = (FSDP2, ORIG, FLAT)
NONE = "none"  # the path that shards nothing


@dataclass(frozen=True)
class Program:
    """A function of a `Run`, and what is known of it.

    ranks: how many there are. parts: how many have data of their own (with tensor parallelism,
        ranks of one group have the same); rank // (ranks // parts) is a rank's part.
    tolerance: between implementations; reference_tolerance: from one process.
    reason: why a tolerance is wider than `TOLERANCE`, or there is no reference.
    has_reference: whether one process can run it. If not, ours is compared with PyTorch's alone.
    warns: how the warnings begin that ours may give and one process does not.
    limit_s: on one path, for all ranks.
    """

    name: str
    body: Callable[[Run], None]
    theme: str
    faces: tuple[str, ...] = FACES
    ranks: int = 2
    parts: int = 2
    tolerance: float = TOLERANCE
    reference_tolerance: float = TOLERANCE
    reason: str = ""
    has_reference: bool = True
    warns: tuple[str, ...] = ()
    differs: Mapping[str, str] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    skips: Mapping[str, str] = field(default_factory=dict)
    zeros: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 30.0

    def declared(self, kind: Mapping[str, str], face: str, path: str) -> str:
        """Return the reason given for a path, or nothing."""
        place = f"{face}/{path}"
        found = [reason for pattern, reason in kind.items() if fnmatch.fnmatch(place, pattern)]
        return found[0] if found else ""


PROGRAMS: dict[str, Program] = {}


def program(
    *,
    ranks: int = 2,
    parts: int | None = None,
    tolerance: float | None = None,
    reference_tolerance: float | None = None,
    reason: str = "",
    cases: Mapping[str, Mapping[str, object]] | None = None,
    **options: object,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare a program, or one per case: a name, and what the function is called with besides.

    A case may also say `differs`, `broken` and so on, for itself.
    """
    wider = max(tolerance or 0.0, reference_tolerance or 0.0) > TOLERANCE
    if wider or options.get("has_reference") is False:
        assert reason, "a wider tolerance, or no reference, needs a reason"

    def declare(body: Callable[..., None]) -> Callable[..., None]:
        theme = body.__module__.rpartition(".")[2]
        for case, arguments in (cases or {"": {}}).items():
            name = f"{body.__name__}-{case}" if case else body.__name__
            known = {key: value for key, value in arguments.items() if key in _FIELDS}
            rest = {key: value for key, value in arguments.items() if key not in _FIELDS}
            settings: dict[str, object] = {
                "ranks": ranks,
                "parts": parts or known.get("ranks", ranks),
                "tolerance": tolerance or TOLERANCE,
                "reference_tolerance": max(reference_tolerance or 0.0, tolerance or 0.0)
                or TOLERANCE,
                "reason": reason,
                **options,
                **known,
            }
            assert name not in PROGRAMS, f"{name} is declared twice"
            assert inspect.getdoc(body), f"{name} does not say what it is about"
            PROGRAMS[name] = Program(name, _bind(body, rest), theme, **settings)  # type: ignore[arg-type]
        return body

    return declare


def _bind(body: Callable[..., None], arguments: Mapping[str, object]) -> Callable[[Run], None]:
    return lambda run: body(run, **arguments)


_FIELDS = set(inspect.signature(Program).parameters) - {"name", "body", "theme"}


def programs_and_faces() -> Iterator[tuple[Program, str]]:
    """Yield every program on each of its faces."""
    for each in PROGRAMS.values():
        for face in each.faces:
            yield each, face
