"""What is verified, and how: the options of `fullshard verify` as one checked value."""

import dataclasses
import math
from pathlib import Path
from typing import ClassVar, NamedTuple

from fullshard.tools.cli_options import panel
from fullshard.tools.config import OptionError
from fullshard.tools.import_path import check_import_path
from fullshard.tools.typed_program import why_no_script

APIS = ("fully_shard", "fsdp1")
COMMS = ("auto", "process_group", "collectives")  # values of CommChoice
DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"}
"""Names that torch has for what can be typed."""
_program, _sharding = panel("Program"), panel("Sharding")
_training, _comparing = panel("Training"), panel("Comparing")
_OF_FACTORIES = {
    **{name: f"--{name}" for name in ("batch", "loss", "shard", "api", "dtype", "lr")},
    "evaluates": "--eval",
}


class Tolerance(NamedTuple):
    """How much a tensor may differ: rtol of its own largest value, plus atol of the largest of its kind."""

    rtol: float
    atol: float


TOLERANCES = {
    "torch.float64": Tolerance(1e-9, 1e-11),
    "torch.float32": Tolerance(1e-4, 1e-5),
    "torch.float16": Tolerance(1e-2, 2e-3),
    "torch.bfloat16": Tolerance(4e-2, 1e-2),
}
"""By the least precise dtype in which either side computes: sums in another order differ by less."""


@dataclasses.dataclass(frozen=True)
class VerifyOptions:
    """What to verify and how; empty and None mean what the command's help says.

    model: an import path, MODULE:FUNCTION, or a script, whose arguments are ``arguments``. is_module: whether the script is a
    module's name, for ``-m``.
    """

    model: str
    batch: str = _program(
        "",
        "batch(step): the whole batch of a step, from 0, which is divided among ranks along dim 0. Tensors, or tuples, "
        "lists and dicts of them.",
        metavar="MODULE:FUNCTION",
    )
    loss: str = _program(
        "",
        'loss(model, batch): a scalar. Default: what the model returns, its .loss, or its ["loss"].',
        metavar="MODULE:FUNCTION",
    )
    shard: str = _program(
        "",
        "shard(model): the sharded model. Default: units of repeated blocks.",
        metavar="MODULE:FUNCTION",
    )
    api: str = _sharding("fully_shard", "Without --shard: fully_shard or fsdp1.")
    comm: str = _sharding("auto", "auto, process_group or collectives.")
    ranks: int = _sharding(2, "Local ranks, 2 to 4.")
    device: str = _sharding("cpu", "cpu or cuda.")
    dtype: str = _training("", "Of model and batch: fp64, fp32, bf16. Default: as it is.")
    steps: int = _training(3, "Optimizer steps.")
    lr: float = _training(0.01, "Learning rate of SGD.")
    seed: int = _training(0, "Decides first values and random numbers.")
    evaluates: bool = _training(False, "In evaluation mode, so without dropout.", "--eval")
    rtol: float | None = _comparing(
        None, "Of a tensor's largest value. Default: by dtype, fp32 1e-4."
    )
    atol: float | None = _comparing(None, "Of the largest value of its kind. Default: fp32 1e-5.")
    divide_factor: float | None = _comparing(
        None,
        "What your script divides summed gradients by on purpose. Default: the number of ranks.",
    )
    timeout_s: float = _comparing(
        300.0,
        "Seconds for the one process, and again for the ranks; for each run of a script.",
        "--timeout",
    )
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    MAX_RANKS: ClassVar[int] = 4

    @property
    def script(self) -> str:
        """The path of the script; empty if a factory is verified."""
        is_script = self.is_module or self.model.endswith(".py")
        return self.model if is_script or Path(self.model).is_file() else ""

    def __post_init__(self) -> None:
        if self.script:
            self._check_script()
        else:
            check_import_path(self.model)
            if self.arguments or self.divide_factor is not None:
                given = " ".join(self.arguments) or "--divide-factor"
                raise OptionError(f"{given}: for a script, and {self.model} is none.")
        for target in filter(None, (self.batch, self.loss, self.shard)):
            check_import_path(target)
        _check_choice("--api", self.api, APIS)
        _check_choice("--comm", self.comm, COMMS)
        _check_choice("--device", self.device, ("cpu", "cuda"))
        _check_choice("--dtype", self.dtype, ("", *DTYPES))
        _check_number("--ranks", self.ranks, least=2, most=self.MAX_RANKS)
        _check_number("--steps", self.steps, least=1)
        _check_number("--lr", self.lr)
        if self.divide_factor is not None and not self.divide_factor > 0:
            raise OptionError(f"--divide-factor {self.divide_factor:g}: give a positive number.")
        _check_number("--timeout", self.timeout_s, least=1)
        _check_number("--rtol", self.rtol or 0)
        _check_number("--atol", self.atol or 0)

    def _check_script(self) -> None:
        if not self.is_module and (why := why_no_script(self.script, self.arguments)):
            raise OptionError(why)
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        given = [name for name in _OF_FACTORIES if getattr(self, name) != defaults[name]]
        if given:
            options = ", ".join(_OF_FACTORIES[name] for name in given)
            raise OptionError(
                f"{options}: for MODULE:FUNCTION. {self.script} says itself what it trains, and how; its own "
                f"arguments follow --, as in: fullshard verify {self.script} -- --lr 0.1"
            )

    def tolerance(self, dtypes: set[str]) -> Tolerance:
        """Return what was asked for, or what fits the least precise of the dtypes that took part.

        dtypes: as torch prints them, such as "torch.float32".
        """
        taken = [each for dtype, each in TOLERANCES.items() if dtype in dtypes]
        rtol, atol = max(taken, default=TOLERANCES["torch.float32"])
        return Tolerance(
            rtol if self.rtol is None else self.rtol, atol if self.atol is None else self.atol
        )


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(f"{option} {value}: choose from {', '.join(filter(None, choices))}.")


def _check_number(option: str, value: float, *, least: float = 0, most: float = math.inf) -> None:
    if not least <= value <= most:
        limit = f"from {least:g} to {most:g}" if most < math.inf else f"of at least {least:g}"
        raise OptionError(f"{option} {value:g}: give a number {limit}.")
