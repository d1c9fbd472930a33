"""Every block of code in the documents: Python runs, commands name what exists, data can be read. None is skipped."""

import itertools
import json
import re
import shlex
import tomllib
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from doc_blocks import PAGES, RUN_AT_ONCE, RUN_WITH_STAND_INS, blocks, run_page
from torch import Tensor
from trl import ModelConfig

from trl_ulorl import UloRLConfig
from trl_ulorl.cli import build_parser
from trl_ulorl.cli.train import ScriptArguments

ROOT = Path(__file__).parents[2]
LANGUAGES = {"python", "bash", "yaml", "json", "text", "bibtex"}
TRAINING_OPTIONS = {each.name for cls in (ScriptArguments, UloRLConfig, ModelConfig) for each in fields(cls)} | {
    "config"
}

COMMANDS = [
    pytest.param(line, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, line in enumerate(
        line
        for block in blocks(page, "bash")
        for line in re.sub(r"\\\n\s*", "", block).splitlines()
        if line.strip() and not line.startswith("#")
    )
]


# ------------------------------------------------------------------------------------------------------ what is covered


def test_every_fence_says_what_it_holds():
    for page in PAGES:
        fences = re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) % 2 == 0, page
        assert set(fences[::2]) <= LANGUAGES, page
        assert set(fences[1::2]) <= {""}, page


def test_every_page_with_python_is_run():
    with_python = {page.stem for page in PAGES if blocks(page, "python")}
    assert with_python == RUN_AT_ONCE | RUN_WITH_STAND_INS
    assert not RUN_AT_ONCE & RUN_WITH_STAND_INS


def test_something_is_found():
    found = Counter(language for page in PAGES for language in LANGUAGES for _ in blocks(page, language))
    assert found["python"] >= 15
    assert found["bash"] >= 20
    assert len(COMMANDS) >= 30


# --------------------------------------------------------------------------------------------------------------- Python


@pytest.mark.parametrize("name", sorted(RUN_AT_ONCE))
def test_python_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(name, namespace={"Tensor": Tensor} if name == "CONTRIBUTING" else None)


# ------------------------------------------------------------------------------------------------------------- commands


def options_of(words):
    return {word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")}


def check_training(words):
    assert {name.replace("-", "_") for name in options_of(words)} <= TRAINING_OPTIONS
    for name, value in itertools.pairwise(words):
        if name == "--config":
            assert (ROOT / value).is_file(), value


def check_script(words):
    script, *words = words
    assert (ROOT / script).is_file(), script
    if script in ("examples/train_qwen3.py", "examples/train_code.py"):
        check_training(words)
    else:
        known = re.findall(r'add_argument\("--([a-z0-9_-]+)"', (ROOT / script).read_text(encoding="utf-8"))
        assert options_of(words) <= set(known)


def check_own(words):
    options, others = build_parser().parse_known_args(words)
    if getattr(options, "takes_training_options", False):
        check_training(others)
    else:
        assert not others


def check_launch(words):
    """Options of accelerate itself, then a script or `-m` and a module."""
    known = {name for action in launch_command_parser()._actions for name in action.option_strings}
    while words[0].startswith("--"):
        name, value, *words = words
        assert name in known, name
        if name == "--config_file":
            assert (ROOT / value).is_file(), value
    if words[0] == "-m":
        assert words[1] == "trl_ulorl.cli"
        check_own(words[2:])
    else:
        check_script(words)


def check_sbatch(words):
    """Options of Slurm, then a script of ours and a configuration."""
    script, config = words[-2:]
    assert words[:-2] and words[0].startswith("--")
    assert (ROOT / script).is_file() and (ROOT / config).is_file(), words


def check_make(words):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, is_variable, _ = word.partition("=")
        pattern = rf"^{name} \?=" if is_variable else rf"^{name}:.*##"
        assert re.search(pattern, makefile, re.MULTILINE), word


def check_pip(words):
    assert words[0] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for word in words[1:]:
        match = re.fullmatch(r"(?:\.|trl-ulorl)(?:\[([\w,-]+)\])?", word)
        assert match, word
        assert set((match[1] or "dev").split(",")) <= set(extras), word


def check_python(words):
    if words[:2] == ["-m", "trl_ulorl.cli"]:
        check_own(words[2:])
    elif words[0] == "-m":
        check_foreign(words)
    elif words[0].startswith("benchmarks/"):
        assert (ROOT / words[0]).is_file(), words[0]
    else:
        check_script(words)


def check_foreign(words):
    """Other programs' commands: only those that are named here, so that a misspelt one of ours is not taken for one."""
    assert words[0] in ("serve", "pre-commit") or words[:2] in (
        ["-m", "vllm.entrypoints.openai.api_server"],
        ["-m", "pytest"],
        ["-m", "venv"],
    )


CHECKS = {
    "trl-ulorl": check_own,
    "accelerate": lambda words: check_launch(words[1:]) if words[0] == "launch" else pytest.fail(str(words)),
    "make": check_make,
    "sbatch": check_sbatch,
    "pip": check_pip,
    "python": check_python,
    "vllm": check_foreign,
    "pytest": lambda words: None,
    "pre-commit": lambda words: None,
    "kill": lambda words: None,
}


@pytest.mark.parametrize("line", COMMANDS)
def test_command_names_what_exists(line):
    words = shlex.split(line, comments=True)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):  # variables of the environment
        words = words[1:]
    program = words[0].removeprefix(".venv/bin/").removeprefix(".venv-vllm/bin/")
    assert program in CHECKS, f"{program}: say in CHECKS how to check it"
    CHECKS[program](words[1:])


# ----------------------------------------------------------------------------------------------------------------- data


def test_data_can_be_read():
    for page in PAGES:
        for block in blocks(page, "json"):
            for line in block.splitlines():
                json.loads(line)
        for block in blocks(page, "yaml"):
            assert set(yaml.safe_load(block)) <= TRAINING_OPTIONS
