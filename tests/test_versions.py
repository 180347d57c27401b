import warnings

import pytest

from fullshard.versions import check_torch_version


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu128", "2.13.0+cpu"])
def test_tested_versions_pass_silently(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_torch_version(version)


@pytest.mark.parametrize("version", ["2.10.0", "2.14.0a0+git123", "3.0.0", "nightly"])
def test_other_versions_warn_and_go_on(version: str) -> None:
    with pytest.warns(UserWarning, match=r"tested with torch 2\.11 to 2\.13"):
        check_torch_version(version)
