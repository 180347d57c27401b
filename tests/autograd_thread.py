"""Backward as a device has it, on the CPU: hooks run in a thread of autograd's, while its caller waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

# A function of torch's own, as far as its frame tells.
_names: dict[str, Callable[[Callable[[], object]], object]] = {}
_code = "def _engine_run_backward(wait):\n    return wait()\n"
exec(compile(_code, torch.autograd.graph.__file__, "exec"), _names)
waiting_for_backward = _names["_engine_run_backward"]


def backward_in_a_thread(loss: torch.Tensor) -> None:
    """Run the backward of a loss in another thread. Raises what it raises."""
    raised: list[BaseException] = []
    is_done = threading.Lock()
    is_done.acquire()

    def run() -> None:
        try:
            loss.backward()
        except BaseException as error:
            raised.append(error)
        finally:
            is_done.release()

    # Not of a class of this program, whose frames would count as the program's.
    threading.Thread(target=run, daemon=True).start()
    waiting_for_backward(is_done.acquire)
    if raised:
        raise raised[0]
