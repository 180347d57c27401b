"""Draw what a rank prints while another one hangs: run such a program, and write docs/images/hang.svg.

    python scripts/draw_hang.py [file.svg]

Two ranks train, and one of them sleeps before its step 5. The text is what the other one prints after 8 s, as it is.
"""

import io
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

_PROGRAM = """\
import time
import torch, torch.distributed as dist
from fullshard import fully_shard


def read_batch(step):
    if step == 5 and dist.get_rank() == 1:
        time.sleep(3600)  # a file system that does not answer
    return torch.randn(8, 64)


dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, 100):
    loss = model(read_batch(step)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_COMMAND = "torchrun --nproc-per-node 2 train.py"
_COLUMNS = 84  # readable at 900 pixels
_STYLES = {
    r"\brank \d+": "bold cyan",
    r"has waited \d+ s|alive but not here yet": "bold yellow",
    r'train\.py:\d+|"train\.py", line \d+, in read_batch|time\.sleep\(.*': "bold green",
}


def _report(folder: Path) -> str:
    """Run the program, and return what it prints until the first report is whole."""
    (folder / "train.py").write_text(_PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", *_COMMAND.split()[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "out").open("w") as out:
        job = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)
    try:
        while "Steps count" not in (text := (folder / "out").read_text()):
            assert job.poll() is None, text
            time.sleep(0.2)
    finally:
        job.terminate()
        job.wait()
    return text.replace(f"{folder}/", "").rstrip()


def main(path: Path) -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        text = Text(f"$ {_COMMAND}\n", "bold").append(_report(Path(folder)), "not bold")
    for pattern, style in _STYLES.items():
        text.highlight_regex(pattern, style)
    console = Console(record=True, width=_COLUMNS, file=io.StringIO())
    console.print(text)
    svg = console.export_svg(title="one rank hangs, the other says where")
    # Without rich's fonts, which a browser would fetch.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.S).replace("Fira Code", "ui-monospace")
    path.write_text("\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n")


if __name__ == "__main__":
    main(Path(*sys.argv[1:] or ["docs/images/hang.svg"]))
