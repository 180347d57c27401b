"""Which torch is refused, which one is warned about, and that it happens when fullshard is first used."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import warnings
from pathlib import Path

import pytest

from fullshard.versions import NEWEST, OLDEST, check_torch_version, install_hint
from tests.fresh import in_fresh_forks

REMEDY = re.escape(f"pip install 'torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'.")


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu128", "2.13.0+cpu", "2.15.0+cu132"])
def test_tested_versions_pass_silently(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_torch_version(version)


@pytest.mark.parametrize("version", ["2.16.0a0+git123", "3.0.0", "nightly"])
def test_unknown_versions_warn_and_go_on(version: str) -> None:
    found = re.escape(f"tested with torch 2.11 to 2.15, this is {version}.")
    with pytest.warns(UserWarning, match=f"{found} .*{REMEDY}"):
        check_torch_version(version)


@pytest.mark.parametrize("version", ["2.10.1+cpu", "2.2.0", "1.13.1"])
def test_older_versions_are_refused_with_what_to_install(version: str) -> None:
    found = re.escape(f"runs with torch 2.11 to 2.15, this is {version}.")
    with pytest.raises(ImportError, match=f"{found} .*{REMEDY}"):
        check_torch_version(version)


def test_an_old_torch_is_refused_at_each_use_and_before_anything_is_imported_for_it() -> None:
    (done,) = in_fresh_forks(
        """
import sys, torch
torch.__version__ = "2.10.0+cpu"
import fullshard
for _ in range(2):
    try:
        from fullshard import fully_shard
    except ImportError as error:
        print(error, "fullshard.public" in sys.modules)
"""
    )
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert re.search(rf"this is 2\.10\.0\+cpu\. .*{REMEDY} False$", line)


def test_what_is_missing_is_installed_from_the_clone_or_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = Path(__file__).parents[1]
    assert install_hint("train").endswith(f"'{clone}[train]'")
    # As pip leaves it: the package beside what says where it came from.
    site, build = tmp_path / "site", tmp_path / "a clone"
    facts = site / "fullshard-0.1.0.dist-info"
    for folder in (site / "fullshard", facts, build / "src" / "fullshard"):
        folder.mkdir(parents=True)
        shutil.copy(clone / "src" / "fullshard" / "versions.py", folder)
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: fullshard\nVersion: 0.1.0\nRequires-Dist: torch>=2.11\n"
        "Requires-Dist: torch>=2; extra == 'train'\n"
        "Requires-Dist: absent-one>=1.2; extra == 'train'\n"
        "Requires-Dist: absent-old>=2; (python_version < '3.2') and extra == 'train'\n"
        "Requires-Dist: absent-other; extra == 'log'\n"
    )
    monkeypatch.syspath_prepend(str(site))
    spec = importlib.util.spec_from_file_location("_installed", site / "fullshard" / "versions.py")
    assert spec is not None
    assert spec.loader is not None
    installed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(installed)
    assert installed.install_hint("train") == "pip install 'absent-one>=1.2'"
    assert installed.install_hint("log") == "pip install absent-other"
    url = build.as_uri()
    for how, flag in (({}, ""), ({"editable": True}, "-e ")):
        (facts / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": how}))
        assert installed.install_hint("train") == f"pip install {flag}'{build}[train]'"
    shutil.rmtree(build)
    assert installed.install_hint("train") == "pip install 'absent-one>=1.2'"
