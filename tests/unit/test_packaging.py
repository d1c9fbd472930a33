"""What a stranger gets: the wheel's contents, the metadata, and the files that hosting sites read."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import trl_ulorl

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trl_ulorl"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read_yaml(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def wheel_files(monkeypatch):
    """Files of the package that a wheel built from this checkout would hold, as setuptools says."""
    from setuptools import Distribution

    monkeypatch.chdir(ROOT)
    distribution = Distribution({"script_name": "setup.py"})
    distribution.parse_config_files()
    command = distribution.get_command_obj("build_py")
    command.ensure_finalized()
    built = Path(command.build_lib)
    return {Path(each).relative_to(built).as_posix() for each in command.get_outputs(include_bytecode=False)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:setuptools")
def test_wheel_holds_every_file_of_the_package(monkeypatch):
    files = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = wheel_files(monkeypatch)
    assert files - found == set(), "add them to [tool.setuptools.package-data]"
    assert found - files == set()
    assert {"trl_ulorl/py.typed", "trl_ulorl/data/embedded_model/model.safetensors"} <= found


def test_version_is_the_same_everywhere():
    assert PROJECT["version"] == trl_ulorl.__version__ == str(read_yaml("CITATION.cff")["version"])


def test_classifiers_name_the_pythons_that_are_required():
    named = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)}
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert PROJECT["requires-python"] == f">={min(named, key=lambda each: int(each[2:]))}"
    tested = read_yaml(".github/workflows/ci.yml")["jobs"]["check"]["strategy"]["matrix"]["python"]
    assert set(tested) <= named


def test_citation_names_the_paper_as_the_readme_does():
    (paper,) = read_yaml("CITATION.cff")["references"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (bibtex,) = re.findall(r"^```bibtex\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert paper["title"] in bibtex
    authors = " and ".join(f"{each['family-names']}, {each['given-names']}" for each in paper["authors"])
    assert f"{{{authors}}}" in bibtex
    assert "2507.19766" in bibtex and paper["url"].endswith("2507.19766")


def test_workflow_runs_the_checks():
    jobs = read_yaml(".github/workflows/ci.yml")["jobs"]
    commands = {step["run"] for job in jobs.values() for step in job["steps"] if "run" in step}
    assert commands == {".ci/run", "make dist"}
    for script in (".ci/run", ".ci/try_wheel"):
        assert (ROOT / script).stat().st_mode & 0o111, script


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_form_asks_for_what_it_needs(name):
    form = read_yaml(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "body"} <= form.keys()
    assert any(field["validations"]["required"] for field in form["body"] if "validations" in field)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_of_the_front_pages_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)", text):
        path = ROOT / target if target else ROOT / name
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") for each in headings}


def test_readme_names_every_part_of_the_package():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = readme[readme.index("## Where things are") :].split("```")[1]
    parts = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" and not path.name.startswith("_")}
    parts |= {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    missing = {part for part in parts if not re.search(rf"(?<!\w){re.escape(part)}", tree)}
    assert not missing, "say in the README's tree what they are"


def test_readme_names_every_page_of_the_documents():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = {path.name for path in (ROOT / "docs").glob("*.md") if f"docs/{path.name}" not in readme}
    assert not missing
