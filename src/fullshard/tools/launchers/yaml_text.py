"""YAML of plain values, without a package for it: texts are quoted as in JSON, which is YAML."""

import json
from typing import Any


def to_yaml(value: dict[str, Any], indent: str = "") -> str:
    r"""Return a mapping as lines of YAML, in its order.

    {"a": {"b": [1, "x"], "c": "echo\n"}} becomes:
        a:
          b: [1, "x"]
          c: |
            echo
    """
    return "".join(_entry(f"{indent}{key}:", item, indent) for key, item in value.items())


def _entry(head: str, item: Any, indent: str) -> str:
    if isinstance(item, dict):
        return f"{head}\n{to_yaml(item, indent + '  ')}"
    if isinstance(item, list) and any(isinstance(each, dict) for each in item):
        return f"{head}\n" + "".join(_listed(each, indent + "  ") for each in item)
    if isinstance(item, str) and item.endswith("\n"):
        lines = "".join(f"{indent}  {line}\n" if line else "\n" for line in item.splitlines())
        return f"{head} |\n{lines}"
    return f"{head} {json.dumps(item, ensure_ascii=False)}\n"


def _listed(item: dict[str, Any], indent: str) -> str:
    text = to_yaml(item, indent + "  ")
    return f"{indent}- {text[len(indent) + 2 :]}"
