"""Diffs as git, diff and mail put them, against files as editors leave them."""

from __future__ import annotations

import difflib

import pytest

from hangdoctor.check import environment, subjects, unified
from hangdoctor.errors import InputError

NAME = "sglang/srt/models/tiny.py"
OLD = "a = 1\nb = 2\n\nc = 3\n"
NEW = "a = 1\nb = 4\n\nc = 3\n"


def diff(old=OLD, new=NEW, before=f"a/python/{NAME}", after=f"b/python/{NAME}"):
    return "".join(difflib.unified_diff(lines(old), lines(new), before, after))


def lines(text):
    return [f"{line}\n" for line in text.split("\n")[:-1]]


@pytest.fixture
def world(tmp_path):
    file = tmp_path / NAME
    file.parent.mkdir(parents=True)
    file.write_text(OLD)
    return environment.Environment(python=None, packages=tmp_path)


@pytest.fixture
def subject(world, tmp_path):
    def make(text):
        path = tmp_path / "mine.diff"
        path.write_bytes(text.encode())
        return subjects.of_diff(path, world)

    return make


@pytest.mark.parametrize(
    "text",
    [
        diff(),
        diff().replace("\n", "\r\n"),
        diff(before=NAME, after=NAME),
        diff(before=f'"a/python/{NAME}"', after=f'"b/python/{NAME}"'),
        diff(before=f"i/python/{NAME}", after=f"w/python/{NAME}"),
        diff().replace("@@ -1", "@@ -900"),
        diff().replace("\n \n", "\n\n"),
        f"From 1 Mon Sep 17\nSubject: x\n\n---\n x | 1 +\n\n{diff()}-- \n2.39.0\n\n",
    ],
)
def test_a_diff_is_read_however_it_was_made(subject, text):
    assert subject(text).files[0].text == NEW


def test_a_form_feed_ends_no_line(subject):
    assert subject(diff(new=NEW.replace("4", "'\f'"))).files[0].text == NEW.replace("4", "'\f'")


@pytest.mark.parametrize("name", ["README.md", "python/pyproject.toml", "test/srt/test_tiny.py"])
def test_what_lies_beside_the_package_is_left_out_and_named(subject, name):
    made = subject(diff() + diff("x\n", "y\n", f"a/{name}", f"b/{name}"))
    assert [one.path for one in made.files] == [NAME]
    assert made.title.endswith(f"left out: {name}")


@pytest.mark.parametrize("name", ["README.md", "python/sglang/srt/models/other.py", "../../x.py"])
def test_a_diff_of_nothing_in_the_package_is_refused_in_one_line(subject, name):
    with pytest.raises(InputError) as refused:
        subject(diff("x\n", "y\n", f"a/{name}", f"b/{name}"))
    assert "\n" not in str(refused.value)


def test_a_hunk_that_fits_nowhere_names_its_line():
    (one,) = unified.parse(diff())
    with pytest.raises(InputError, match="nothing like its line 1"):
        unified.apply(one, "z\n")


def test_an_editable_install_is_found_by_its_finder(tmp_path):
    checkout = tmp_path / "python"
    (checkout / "sglang" / "srt").mkdir(parents=True)
    packages = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "__editable___sglang_0_5_9_finder.py").write_text(
        f"MAPPING: dict[str, str] = {{'sglang': '{checkout / 'sglang'}'}}"
    )
    assert environment.find(tmp_path / "env").packages == checkout
