"""The one process does what data-parallel ranks would do, part by part."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.tools.progress import Reporter
from fullshard.tools.verify.options import VerifyOptions
from fullshard.tools.verify.program import Program, train
from fullshard.tools.verify.record import Run, alone_folder, read_tensors
from fullshard.tools.verify.sides import side_of
from fullshard.tools.verify.watching import EnoughError, Watch
from tests.tools.verify import programs

BATCH = torch.arange(8.0).reshape(4, 2)


def _ran(folder: Path, model: nn.Module, loss: Any, batch: Any = BATCH) -> Run:
    """Run one step for two ranks, at a learning rate of 1."""
    options = VerifyOptions("here:build", steps=1, lr=1.0)
    side = side_of(options, folder, 0, is_whole=True)
    watch = Watch(side, Reporter(), lambda: None)
    with contextlib.suppress(EnoughError), watch.watching():
        train(Program(options, lambda: model, lambda _: batch, loss, None), side, watch)
    return side.diary.run


def _largest(model: nn.Module, part: Tensor) -> Tensor:
    """Return a loss that is no mean over samples."""
    return model(part).max()


def test_gradients_are_the_mean_over_parts_whatever_the_loss(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    run = _ran(tmp_path, model, _largest)
    assert [part.loss for part in run.parts] == [5.0, 13.0]
    tensors = read_tensors(alone_folder(tmp_path), "step-1")
    assert tensors["gradient/weight"].tolist() == [[4.0, 5.0]]  # of rows (2, 3) and (6, 7)
    assert tensors["parameter/weight"].tolist() == [[-3.0, -4.0]]
    assert tensors["output/0/#0"][:2].tolist() == [1.0, 5.0]
    assert tensors["output/1/#0"][:2].tolist() == [9.0, 13.0]


def test_each_part_has_masks_and_buffers_of_its_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5))
    batch = BATCH[:2].repeat(64, 1)
    _ran(tmp_path, model, lambda model, part: model(part).sum(), batch)
    tensors = read_tensors(alone_folder(tmp_path), "step-1")
    assert torch.equal(tensors["output/0/0#0"], tensors["output/1/0#0"])
    assert not torch.equal(tensors["output/0/1#0"], tensors["output/1/1#0"])
    for rank in (0, 1):
        assert tensors[f"buffer/{rank}/0.num_batches_tracked"] == 1


def test_what_a_forward_writes_to_is_known(tmp_path: Path) -> None:
    model = nn.Sequential(programs.Clamping(2, 2), nn.Linear(2, 1))
    run = _ran(tmp_path, model, _largest)
    assert [part.written for part in run.parts] == [("0.weight",), ()]


def test_a_parameter_without_gradient_has_one_of_zeros(tmp_path: Path) -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1, bias=False)})
    _ran(tmp_path, model, lambda model, part: model["used"](part).sum())
    assert read_tensors(alone_folder(tmp_path), "step-1")["gradient/unused.weight"].tolist() == [
        [0.0, 0.0]
    ]
