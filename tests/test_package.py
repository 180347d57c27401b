"""What is built is whole and says the truth; `make package` also installs it and uses it, which takes a download."""

from __future__ import annotations

import email
import email.message
import os
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from trove_classifiers import classifiers as known_classifiers

import fullshard

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
_MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
RELEASE = runpy.run_path(str(ROOT / "scripts" / "release_notes.py"), run_name="release_notes")
LEFT_OUT = {".ci", ".pre-commit-config.yaml", ".gitattributes"}  # of what is tracked


class Built(NamedTuple):
    """Names of the files, and the metadata."""

    wheel: dict[str, int]
    sdist: dict[str, int]
    metadata: email.message.Message


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build both, with the backend that pip calls, as it calls it."""
    folder = tmp_path_factory.mktemp("dist")
    program = "import sys, hatchling.build as b; print(b.build_sdist(sys.argv[1]), b.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    sdist, wheel = done.stdout.split()
    with zipfile.ZipFile(folder / wheel) as archive:
        files = {info.filename: info.file_size for info in archive.infolist()}
        (name,) = [name for name in files if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    with tarfile.open(folder / sdist) as archive:
        members = {m.name.partition("/")[2]: m.size for m in archive.getmembers()}
    return Built(files, members, metadata)


def _tracked() -> list[str]:
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a clone: nothing says what belongs to it")
    # Also what is new; what was removed and not committed yet is no file.
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


# Content


def test_the_wheel_holds_all_of_the_package_and_nothing_else(built: Built) -> None:
    """Page templates and `py.typed` too, which are no Python."""
    expected = {name.removeprefix("src/") for name in _tracked() if name.startswith("src/")}
    packaged = {name for name in built.wheel if ".dist-info/" not in name}
    assert packaged == expected
    assert {"fullshard/py.typed", "fullshard/tools/page/report.html"} <= packaged
    assert sum(built.wheel.values()) < 6e6


def test_the_sdist_holds_what_is_tracked_and_nothing_else(built: Built) -> None:
    expected = {name for name in _tracked() if name.partition("/")[0] not in LEFT_OUT}
    # Results that were not kept are no reason to fail; a release is built from a fresh clone.
    packaged = {name for name in built.sdist if not name.startswith("bench/results/")}
    assert packaged - {"PKG-INFO"} == {n for n in expected if not n.startswith("bench/results/")}
    assert {n for n in expected if n.startswith("bench/results/")} <= {*built.sdist}
    assert max(built.sdist.values()) < 200_000  # no results, weights or pictures of megabytes


# Metadata


def test_the_version_is_that_of_the_library(built: Built) -> None:
    assert built.metadata["Name"] == "fullshard"
    assert built.metadata["Version"] == fullshard.__version__
    assert built.metadata["License-Expression"] == "Apache-2.0 AND MIT"


def _urls(metadata: email.message.Message) -> dict[str, str]:
    return dict(line.split(", ", 1) for line in metadata.get_all("Project-URL"))


def test_the_project_s_addresses_are_those_of_one_repository(built: Built) -> None:
    urls = _urls(built.metadata)
    assert urls.keys() == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    home = urls["Homepage"]
    assert all(url.startswith(home) for url in urls.values())
    # So does whatever else names it.
    name = home.removeprefix("https://github.com/")
    for path in [*ROOT.glob(".github/**/*"), *ROOT.glob("*.md"), ROOT / "pyproject.toml"]:
        if path.is_file():
            for found in re.findall(
                r"github(?:usercontent)?\.com/([\w.-]+/fullshard)\b", path.read_text()
            ):
                assert found == name, path


def test_classifiers_exist_and_name_the_versions_of_python_that_ran_it(built: Built) -> None:
    classifiers = built.metadata.get_all("Classifier")
    assert {*classifiers} <= known_classifiers
    assert classifiers == sorted(classifiers)
    versions = [c.rpartition(" ")[2] for c in classifiers if re.search(r":: 3\.\d+$", c)]
    allowed = SpecifierSet(built.metadata["Requires-Python"])
    assert versions == [f"3.{i}" for i in range(10, 10 + len(versions))]
    assert all(version in allowed for version in versions)
    assert "3.9" not in allowed
    # The page says how each was tried, and GitHub tries each.
    table = (ROOT / "docs" / "limits.md").read_text()
    (row,) = re.findall(r"(?m)^\| Python \|.*", table)
    assert {*re.findall(r"3\.\d+", row.split("|")[2])} == {*versions}
    (matrix,) = re.findall(r"python: (\[.*\])", (ROOT / ".github/workflows/test.yml").read_text())[
        :1
    ]
    assert yaml.safe_load(matrix) == versions


def test_the_torch_that_is_needed_is_the_oldest_that_is_not_refused(built: Built) -> None:
    oldest, _ = fullshard.versions.OLDEST, fullshard.versions.NEWEST
    assert f"torch>={oldest[0]}.{oldest[1]}" in built.metadata.get_all("Requires-Dist")


def test_nothing_but_torch_and_numpy_is_needed_without_an_extra(built: Built) -> None:
    needed = [each for each in built.metadata.get_all("Requires-Dist") if "extra ==" not in each]
    assert sorted(re.split(r"\W", each)[0] for each in needed) == ["numpy", "torch"]
    assert {"train", "checkpoint", "notebook"} <= {*built.metadata.get_all("Provides-Extra")}


_LINK = r'(?<=\]\()[^)\s]+(?=\))|(?<=src=")[^"]+|(?<=srcset=")[^"]+'


def _links(text: str) -> Iterator[str]:
    yield from re.findall(_LINK, re.sub(r"(?s)```.*?```", "", text))


def test_the_package_page_is_the_readme_with_links_that_lead_somewhere(built: Built) -> None:
    page = built.metadata.get_payload()
    assert isinstance(page, str)
    assert built.metadata["Description-Content-Type"] == "text/markdown"
    home, version = _urls(built.metadata)["Homepage"], built.metadata["Version"]
    raw = home.replace("github.com", "raw.githubusercontent.com")
    before, after = [*_links(README)], [*_links(page)]
    assert len(before) == len(after) > 20
    for relative, absolute in zip(before, after, strict=True):
        if "://" in relative:
            assert absolute == relative
        elif relative.endswith(".png"):
            assert absolute == f"{raw}/v{version}/{relative}"
        else:
            assert absolute == f"{home}/blob/v{version}/{relative}"
    # And nothing else has changed.
    unlinked = [re.sub(_LINK, "", text).strip() for text in (README, page)]
    assert unlinked[0] == unlinked[1]


# A release


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Write what a release is made of."""
    (tmp_path / "src" / "fullshard").mkdir(parents=True)
    (tmp_path / "src" / "fullshard" / "versions.py").write_text('VERSION = "0.2.0"\n')
    changes = "# Changelog\n\n## 0.2.0 (2027-01-02)\n\n- New.\n\n## 0.1.0\n\n- Old.\n"
    (tmp_path / "CHANGELOG.md").write_text(changes)
    return tmp_path


def test_a_release_has_its_part_of_the_changelog(tree: Path) -> None:
    assert RELEASE["notes_of"]("v0.2.0", tree) == "- New."


@pytest.mark.parametrize(
    ("tag", "change", "message"),
    [
        ("0.2.0", None, "begins with v"),
        ("v0.1.0", None, r"v0\.1\.0: src/fullshard/versions\.py has 0\.2\.0"),
        ("v0.2.0", "src/fullshard/versions.py", r"versions\.py has 0\.3\.0"),
        ("v0.2.0", "CHANGELOG.md", r'CHANGELOG\.md has nothing under "## 0\.2\.0"'),
    ],
)
def test_a_tag_that_is_not_the_version_is_refused(
    tag: str, change: str | None, message: str, tree: Path
) -> None:
    if change:
        path = tree / change
        path.write_text(path.read_text().replace("0.2.0", "0.3.0"))
    with pytest.raises(RELEASE["ReleaseError"], match=message):
        RELEASE["notes_of"](tag, tree)


def test_the_version_of_this_tree_is_one() -> None:
    """What a tag is compared with can be found; the changelog's part comes when it is released."""
    script = ROOT / "scripts" / "release_notes.py"
    command = [sys.executable, str(script), f"v{fullshard.__version__}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        assert "CHANGELOG.md has nothing under" in done.stderr
    else:
        assert done.stdout.strip()


# Workflows and forms


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_do_little_and_end(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert "concurrency" in workflow
    for name, job in workflow["jobs"].items():
        if "uses" in job:  # another workflow of these
            assert (ROOT / job["uses"]).is_file()
            continue
        assert job["timeout-minutes"] <= 120, name
        for step in job["steps"]:
            # A tag can be moved by whoever has taken over an action; a commit cannot.
            assert re.search(r"@[0-9a-f]{40}$", step.get("uses", f"@{'0' * 40}")), step
            # What others can name, such as a branch, goes through the environment, not into a shell's text.
            assert "${{" not in step.get("run", ""), step
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_a_release_waits_for_all_tests() -> None:
    jobs = {path.stem: yaml.safe_load(path.read_text())["jobs"] for path in WORKFLOWS}
    called = {name: job["uses"] for name, job in jobs["release"].items() if "uses" in job}
    assert {Path(path).stem for path in called.values()} == {"test", "nightly"}
    assert {"build", *called} <= {*jobs["release"]["publish"]["needs"]}


def test_workflows_call_what_is_there() -> None:
    targets = {*re.findall(r"^([a-z-]+):.*## ", _MAKEFILE, re.MULTILINE)}
    called = [line for path in WORKFLOWS for line in path.read_text().splitlines()]
    for line in called:
        for target in re.findall(r"\bmake ([a-z-]+)", line.partition("#")[0]):
            assert target in targets
        for script in re.findall(r"\bscripts/\w+\.py", line):
            assert (ROOT / script).exists()
    assert len(called) > 50


def test_the_fast_tests_are_there() -> None:
    (paths,) = re.findall(r"(?ms)^QUICK := \$\(addprefix tests/,(.*?)\)$", _MAKEFILE)
    assert all((ROOT / "tests" / path).exists() for path in paths.replace("\\", "").split())


def test_forms_ask_for_commands_that_are_there() -> None:
    for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name == "config.yml":
            continue
        ids = [field["id"] for field in form["body"] if "id" in field]
        assert len(ids) == len({*ids})
        for page in re.findall(r"\b(?:docs/)?\w+\.md\b", path.read_text()):
            assert (ROOT / page).exists(), page
    bug = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    assert "fullshard doctor --json" in bug


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_package_can_be_installed_and_used(tmp_path: Path) -> None:
    """All of `make package`: it downloads, torch too."""
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "scripts" / "check_package.py"),
            "--dist",
            str(tmp_path / "dist"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the package is as it should be" in done.stdout
