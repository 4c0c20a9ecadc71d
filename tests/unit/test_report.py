"""Commands that are printed: what was typed stands there, not what the shell made of it."""

from __future__ import annotations

import shlex
import subprocess
from glob import glob
from pathlib import Path

import pytest

from vllm_eesd.distill.config import DistillConfig
from vllm_eesd.distill.report import as_typed, command
from vllm_eesd.distill.training_record import again


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for directory in (Path("texts"), Path("my texts")):
        directory.mkdir()
        for index in range(20):
            (directory / f"a{index}.txt").write_text("x")
            (directory / f"b{index}.txt").write_text("x")
        (directory / "notes.md").write_text("x")
        (directory / ".hidden.txt").write_text("x")


@pytest.mark.parametrize(
    ("typed", "printed"),
    [
        (["texts/*.txt"], "texts/*.txt"),
        (["./texts/*.txt"], "./texts/*.txt"),
        (["my texts/*.txt"], "'my texts/'*.txt"),
        (["texts/b*.txt"], "texts/b*.txt"),
        (["texts"], "texts"),
        (["texts/a1.txt", "texts/*.md"], "texts/a1.txt texts/notes.md"),
        (["texts/*.txt", "my texts/*.txt"], "texts/*.txt 'my texts/'*.txt"),
        (["texts/a?.txt"], " ".join(f"texts/a{i}.txt" for i in range(10))),  # as they are: no pattern of one * says it
        (["texts/*[0-8].txt"], "FILES"),
        (["no/such/file.txt"], "no/such/file.txt"),
    ],
)
def test_patterns_stay_patterns(texts, typed, printed):
    given = [name for one in typed for name in (sorted(glob(one)) or [one])]
    words = command("eesd", "probe", "M", "--text", *as_typed(given))
    assert words == f"eesd probe M --text {printed}"
    if "FILES" not in words:
        expanded = subprocess.run(["bash", "-c", f"printf '%s\\n' {printed}"], capture_output=True, text=True).stdout
        assert sorted(expanded.split("\n")[:-1]) == sorted(given)


def test_files_of_a_directory_that_is_gone(texts):
    given = [f"gone/{index}.txt" for index in range(20)]
    assert as_typed(given) == given and as_typed(given * 2) == ["FILES"]


def test_the_recorded_command_names_no_hundred_files(texts):
    data = sorted(glob("texts/*.txt"))
    settings = {"model": "M", "exit_layer": 1, "output": "a head", "data": data, "held_out": ["texts/notes.md"]}
    words = again(DistillConfig(**settings))
    assert "--data 'texts/*.txt'" not in words and "--data texts/*.txt --held-out texts/notes.md" in words
    assert shlex.split(words)[-2:] == ["--output", "a head"]
