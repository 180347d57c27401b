"""What is recorded of the outputs of modules."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from fullshard.tools.verify.watching import SAMPLE_NUMEL, OutputRecorder, Seen

CPU = torch.device("cpu")


class _Constant(nn.Module):
    """Returns what it was given, as part of a dict, with something that is no number of floating point."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self) -> dict[str, object]:
        return {"counts": torch.ones(3, dtype=torch.int64), "values": [self.value]}


def _seen(model: nn.Module, *inputs: torch.Tensor) -> list[Seen]:
    recorder = OutputRecorder(CPU)
    recorder.know({module: path for path, module in model.named_modules()})
    handles = [
        module_hooks.register_module_forward_pre_hook(recorder.before),
        module_hooks.register_module_forward_hook(recorder.after),
    ]
    for recorder.is_on in (False, True, False):
        model(*inputs)
    for handle in handles:
        handle.remove()
    return recorder.take()


def test_modules_are_recorded_as_they_end_and_only_when_asked() -> None:
    inner = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(inner), inner)
    outputs = [each.output for each in _seen(model, torch.ones(1, 2))]
    assert [(o.path, o.call, o.kind) for o in outputs] == [
        ("0.0", 0, "Linear"),
        ("0", 0, "Sequential"),
        ("0.0", 1, "Linear"),
        ("", 0, "Sequential"),
    ]


def test_a_sample_is_small_and_sees_every_value() -> None:
    value = torch.zeros(5 * SAMPLE_NUMEL + 3)
    (before,) = _seen(_Constant(value))
    assert before.output.shape == tuple(value.shape)
    assert len(before.sample) <= SAMPLE_NUMEL + 1
    for place in (0, 1, len(value) - 1):
        changed = value.clone()
        changed[place] = 1.0
        (after,) = _seen(_Constant(changed))
        assert not torch.equal(before.sample, after.sample)
        assert after.sample.shape == before.sample.shape


def test_modules_that_draw_random_numbers_are_known() -> None:
    class Own(nn.Identity):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator()

    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), Own(), nn.Dropout().eval())
    model[3].eval()
    is_random = {each.output.path: each.output.is_random for each in _seen(model, torch.ones(1, 2))}
    assert is_random == {"0": False, "1": True, "2": True, "3": False, "": True}
