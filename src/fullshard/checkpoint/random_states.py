"""The random generators of this process, as extra state of a checkpoint."""

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

RNG = "rng"  # their key among the extra state


def random_states() -> dict[str, Any]:
    """Return the states of the random generators of this process: Python's, NumPy's and torch's."""
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": (version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss),
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = tuple(numpy.random.get_state())
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator.type)
        states["device"] = module.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Continue random generators from states; those of generators that are not here are left out."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    torch.set_rng_state(states["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and "device" in states:
        torch.get_device_module(accelerator.type).set_rng_state(states["device"])
