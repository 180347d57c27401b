"""Run every example under fullshard and under what it is compared with, and write docs/parity.md.

    make parity                                      in an environment with all libraries
    python scripts/record_parity.py --only moe       compare one, and write nothing

Both runs are the same program with the same options, on as many CPU ranks, one thread each. Compared is
every loss that it prints. Exits with 1 if a run fails or a difference is larger than its limit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "parity.md"
LIMIT_S = 240

# In place of fullshard, for programs that import it: what PyTorch and Transformers have for the same.
IN_PLACE_OF_FULLSHARD = """
from types import SimpleNamespace

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

WHOLE = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


def load_hf(model, folder):
    from transformers import AutoModel

    whole = AutoModel.from_pretrained(folder).state_dict()
    options = states.StateDictOptions(full_state_dict=True, strict=False)
    states.set_model_state_dict(model, whole, options=options)
    return SimpleNamespace(nbytes=0, num_tensors=len(whole))


def export_hf(model, folder, config, overwrite):
    from transformers import AutoModel

    whole = states.get_model_state_dict(model, options=WHOLE)
    if dist.get_rank() == 0:
        own = AutoModel.from_pretrained(config)
        own.load_state_dict(whole)
        own.save_pretrained(folder)
    return SimpleNamespace(files=[], nbytes=0)
"""


@dataclass(frozen=True)
class Run:
    """One way to start an example.

    script: its name. options: of the script; {out} is a folder of this run's. before: of fullshard.run, which
    is left out if it is None. in_place: whether `import fullshard` gets PyTorch's.
    """

    script: str
    options: Sequence[str] = ()
    before: Sequence[str] | None = None
    ranks: int = 2
    in_place: bool = False

    def losses(self, *, python: str = sys.executable) -> list[float]:
        """Run it, and return the losses that it prints. Raises RuntimeError if it fails or prints none."""
        with tempfile.TemporaryDirectory() as folder:
            done = self.run(Path(folder), python=python)
        losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
        if done.returncode or not losses:
            raise RuntimeError(f"{self.script} failed:\n{done.stdout}\n{done.stderr}")
        return losses

    def run(
        self, folder: Path, *, python: str = sys.executable
    ) -> subprocess.CompletedProcess[str]:
        """Run it in a folder, which is where its outputs are, and return how it ended."""
        paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        if self.in_place:
            (folder / "instead").mkdir()
            (folder / "instead" / "fullshard.py").write_text(IN_PLACE_OF_FULLSHARD)
            paths = [str(folder / "instead")]
        of_run = [] if self.before is None else ["-m", "fullshard.run", *self.before]
        options = [option.format(out=folder / "out") for option in self.options]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        script = str(ROOT / "examples" / f"{self.script}.py")
        return subprocess.run(
            [python, *launcher, *of_run, script, *options],
            cwd=folder,
            env=_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )


@dataclass(frozen=True)
class Case:
    """An example, and what it is compared with.

    limit: for the largest difference of a loss. needs: packages, whose versions are shown. why: of a limit that
    is not zero.
    """

    ours: Run
    theirs: Run
    against: str
    limit: float = 0.0
    needs: Sequence[str] = ()
    why: str = ""

    @property
    def name(self) -> str:
        """The example's name."""
        return self.ours.script


def _under_both(name: str, *, cpu: bool = False, needs: Sequence[str], **how: str) -> Case:
    flags = ["--cpu"] if cpu else []
    options = how.get("options", "").split()
    return Case(
        Run(name, options, flags),
        Run(name, options, [*flags, "--engine", "torch"]),
        "FSDP2",
        needs=needs,
    )


_OUT = "--out {out}"
_ROUNDING = "sums in another order"
_CLIPPING = "by the last bit of the norm that gradients are clipped to, since shards are others: steps in bfloat16 make more of it"
CASES = [
    Case(
        Run("finetune_minilm", ["--out", "{out}"]),
        Run("finetune_minilm", ["--out", "{out}"], in_place=True),
        "FSDP2, weights read by Transformers",
        needs=["transformers"],
    ),
    _under_both("trainer", cpu=True, options=_OUT, needs=["transformers", "accelerate"]),
    _under_both("accelerate_loop", cpu=True, needs=["accelerate"]),
    _under_both("lightning_module", options=_OUT, needs=["lightning"]),
    _under_both("trl_sft", cpu=True, options=_OUT, needs=["trl"]),
    Case(
        Run("torchtitan_llama", before=[]),
        Run("torchtitan_llama", before=[], ranks=1),
        "one process: on CPUs FSDP2 cannot add gradients up as torchtitan wants",
        1e-4,
        needs=["torchtitan"],
        why=_ROUNDING,
    ),
    Case(
        Run("peft_lora", ["--out", "{out}"]),
        Run("peft_lora", ["--out", "{out}"], in_place=True),
        "FSDP2",
        needs=["peft"],
    ),
    Case(Run("moe", ranks=4), Run("moe", ranks=1), "one process", 1e-5, why=_ROUNDING),
    Case(
        Run("fsdp1", ["--out", "{out}"], []),
        Run("fsdp1", ["--out", "{out}"]),
        "FSDP1",
    ),
    Case(
        Run("fsdp1_moved"),
        Run("fsdp1", ["--out", "{out}"]),
        "FSDP1, before the move",
        5e-4,
        why=_CLIPPING,
    ),
    Case(
        Run("checkpoint", ["--folder", "{out}"]),
        Run("checkpoint", ["--folder", "{out}"], ranks=1),
        "one process",
        1e-5,
        why=_ROUNDING,
    ),
]
# One samples on each rank what it learns from, so nothing else does the same steps; one is about restarting.
WITHOUT_PARITY = {"grpo", "ray_train"}


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest difference of two runs' losses, of which there must be equally many."""
    if len(ours) != len(theirs):
        raise RuntimeError(f"{len(ours)} losses against {len(theirs)}")
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def main() -> int:
    """Compare, and write the page unless only some are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES])
    chosen = parser.parse_args().only
    rows, failed = [], []
    for number, case in enumerate(
        cases := [c for c in CASES if chosen is None or c.name in chosen], 1
    ):
        print(f"{number}/{len(cases)} {case.name} against {case.against}", flush=True)
        try:
            ours, theirs = case.ours.losses(), case.theirs.losses()
            largest = difference(ours, theirs)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            failed.append(case.name)
            continue
        print(
            f"    {len(ours)} losses, {ours[0]:.4f} to {ours[-1]:.4f}: they differ by {largest:.1e}"
        )
        if largest > case.limit:
            failed.append(case.name)
        rows.append(_row(case, ours, largest))
    if failed:
        print(f"failed, or differ by more than their limit: {', '.join(failed)}", file=sys.stderr)
        return 1
    if chosen is None:
        PAGE.write_text(_page(rows))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def _row(case: Case, losses: Sequence[float], largest: float) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in case.needs)
    apart = "none" if largest == 0 else f"{largest:.0e}, {case.why}"
    example = f"[{case.name}](../examples/{case.name}.py)"
    span = f"{losses[0]:.3f} to {losses[-1]:.3f}"
    return f"| {example} | {versions} | {case.ours.ranks} | {case.against} | {len(losses)}, {span} | {apart} |"


def _page(rows: Sequence[str]) -> str:
    torch = importlib.metadata.version("torch")
    return "\n".join(
        [
            "# Parity of the examples",
            "",
            "`make parity` writes this page: it runs every example under fullshard and once more under what it is",
            "compared with, and compares all losses that it prints, to six decimals. The libraries are those of",
            "[examples/requirements.txt](../examples/requirements.txt), in an environment of its own, `.venv-examples`.",
            "",
            f"Recorded with torch {torch}, Python {platform.python_version()}, on CPU ranks with one thread each.",
            "",
            "| example | libraries | ranks | compared with | losses | largest difference |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
            "Not compared: [grpo](../examples/grpo.py), which learns from what it samples on each rank, and",
            "[ray_train](../examples/ray_train.py), which shows how a run starts again ([launch.md](launch.md)).",
            "",
        ]
    )


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    return kept | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


if __name__ == "__main__":
    sys.exit(main())
