"""Machines as the planner sees them: what a GPU can do at most, and what joins GPUs.

Figures are the makers' nominal ones, dense, without sparsity. How near to them one comes is said by
`planning.measured` for the GPUs that somebody measured; the others stand beside the one that is most like them.
"""

import dataclasses
import difflib
import math
from typing import TYPE_CHECKING, Any

from fullshard.errors import FullshardError

if TYPE_CHECKING:
    from fullshard.planning.calibration import MachineFigures

_GIB = 1 << 30


class MachineError(FullshardError, ValueError):
    """A machine that is not known, or numbers that are none of a machine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU model.

    flops: of bfloat16 matrix products, a second. fp8: how many times as many in 8 bits, 1 where it has none.
    float32: how many times as many as in float32 at torch's default precision, which is not TF32.
    memory_nbytes: that a program can use. memory_rate, link_rate: bytes a second of its memory, and to the
        other GPUs of a host, one direction. network_rate: of a host's network for each of its GPUs, where nobody says.
    host_rate: to and from the host's memory, one direction. per_host: GPUs between which the link holds.
    figures: whose measured figures it is given. matmul: how much of that GPU's share of the nominal rate it reaches.
    attention: how much of the rate of the fastest kernel FlashAttention-2 reaches, which is what torch runs.
    is_power_limited: it is sold with less power than its nominal rate needs.
    """

    name: str
    flops: float
    memory_nbytes: float
    memory_rate: float
    link_rate: float
    figures: str
    fp8: float = 2.0
    float32: float = 15.5  # of A100, H100 and H200 alike
    network_rate: float = 50e9
    host_rate: float = 50e9
    per_host: int = 8
    matmul: float = 1.0
    attention: float = 1.0
    is_power_limited: bool = False


def _gpu(name: str, figures: str, numbers: tuple[float, float, float, float], **more: Any) -> Gpu:
    tflops, gib, memory, link = numbers
    return Gpu(name, tflops * 1e12, gib * _GIB, memory * 1e9, link * 1e9, figures, **more)


_AMPERE: dict[str, Any] = {"fp8": 1.0, "network_rate": 12.5e9, "host_rate": 25e9}
# On Hopper, the fastest kernels are FlashAttention-3 and cuDNN's; on CDNA, AMD's.
_HOPPER: dict[str, Any] = {"attention": 0.55}
_BLACKWELL: dict[str, Any] = {"attention": 0.88, "float32": 30.0}
_RACK: dict[str, Any] = {"per_host": 64, "host_rate": 200e9, **_BLACKWELL}
_CARD: dict[str, Any] = {"network_rate": 3e9, "host_rate": 25e9, "float32": 2.0}
GPUS = {
    gpu.name: gpu
    for gpu in (
        # TFLOP/s, GiB, GB/s of memory, GB/s of the link
        _gpu("A100-40GB-SXM", "A100", (312, 39.4, 1555, 300), **_AMPERE),
        _gpu("A100-80GB-SXM", "A100", (312, 79.2, 2039, 300), **_AMPERE),
        _gpu("A800-80GB-SXM", "A100", (312, 79.2, 2039, 200), **_AMPERE),
        _gpu("H100-80GB-SXM", "H100", (989, 79.1, 3350, 450), **_HOPPER),
        _gpu(
            "H100-96GB-HBM2e-500W", "H100", (989, 95, 2400, 450), is_power_limited=True, **_HOPPER
        ),
        _gpu("H100-96GB", "H100", (989, 95, 3000, 450), **_HOPPER),
        _gpu("H200-141GB-SXM", "H200", (989, 139.8, 4800, 450), **_HOPPER),
        _gpu("B200", "B200", (2250, 178.3, 8000, 900), **_BLACKWELL),
        # Measured in 8 bits alone. In 16 bits it takes no more energy for a product than an H100, so it is as fast.
        _gpu(
            *("B200-power-limited", "B200", (2250, 178.3, 8000, 900)),
            **_BLACKWELL | {"attention": 0.65, "fp8": 1.475},
            matmul=0.61,
            is_power_limited=True,
        ),
        _gpu("GB200", "GB200", (2500, 184.3, 8000, 900), **_RACK),
        _gpu("GB300", "GB200", (2500, 277, 8000, 900), **_RACK),
        _gpu("MI300X", "H100", (1307, 191.5, 5300, 448), matmul=0.57, attention=0.42, float32=8.0),
        # The nominal rate is a half of what the chip can do, so it is nearly reached.
        _gpu("L40-48GB", "L40S", (181, 44.4, 864, 25), matmul=1.7, **_CARD),
        _gpu("L40S", "L40S", (362, 44.4, 864, 25), **(_CARD | {"float32": 4.0})),
        _gpu("RTX3090", "L40S", (71, 23.6, 936, 4), matmul=1.7, **(_CARD | {"fp8": 1.0})),
        _gpu("RTX4090", "L40S", (165, 23.6, 1008, 12), matmul=1.7, **_CARD),
    )
}


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """GPUs of one model and what joins them; see `Gpu` for units.

    per_host: GPUs between which `link_rate` holds. network_rate: between hosts, for each GPU.
    figures: of a machine that was measured, whose ranks compute on the CPU (`planning.calibration`); None for GPUs.

    Raises MachineError for numbers that cannot be.
    """

    gpu: Gpu
    per_host: int
    link_rate: float
    network_rate: float
    figures: "MachineFigures | None" = None

    def __post_init__(self) -> None:
        count: Any = self.per_host
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise MachineError(f"per_host is {count!r}: expected a whole number, 1 or more.")
        for name in ("link_rate", "network_rate"):
            rate = getattr(self, name)
            if not isinstance(rate, int | float) or not 0 < rate < math.inf:
                raise MachineError(
                    f"{name} is {rate!r}: expected bytes a second, more than 0, such as 50e9."
                )


def custom_gpu(*, flops: float, memory_nbytes: float, memory_rate: float, link_rate: float) -> Gpu:
    """Return a GPU of which only nominal numbers are known; see `Gpu` for units.

    It comes as near to them as an H100, which is in the middle of those that were measured. Were it the one with
    the most similar numbers, a GPU with a higher rate might be planned to be slower.
    """
    return Gpu("custom GPU", flops, memory_nbytes, memory_rate, link_rate, "H100", **_HOPPER)


def machine_named(
    name: str,
    *,
    per_host: int | None = None,
    link_rate: float | None = None,
    network_rate: float | None = None,
) -> Machine:
    """Return a preset, with other numbers where they are given, in bytes a second.

    Raises MachineError for an unknown name, with the known ones, and for numbers that cannot be.
    """
    gpu = GPUS.get(name)
    if gpu is None:
        hint = f" Did you mean {' or '.join(near)}?" if (near := _near(str(name))) else ""
        raise MachineError(
            f"hardware {name!r} is not known.{hint} Known: {', '.join(GPUS)}. For another, give its numbers: "
            "--flops, --memory, --memory-bandwidth and --link, or a Machine of your own."
        )
    return Machine(
        gpu,
        gpu.per_host if per_host is None else per_host,
        gpu.link_rate if link_rate is None else link_rate,
        gpu.network_rate if network_rate is None else network_rate,
    )


def _near(name: str) -> list[str]:
    """Return the names that begin like one, in capitals or not; else the most similar."""
    typed = name.upper()
    begin = [each for each in GPUS if typed and each.startswith(typed)]
    return begin or difflib.get_close_matches(typed, GPUS, 1, 0.3)
