"""What commands print and pages hold, as JSON that every reader takes."""

import json
import math
from typing import Any


def json_text(value: Any, **layout: Any) -> str:
    """Write a value as `json.dumps` does; numbers that are not finite become text, "nan"."""
    return json.dumps(_finite(value), allow_nan=False, **layout)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
