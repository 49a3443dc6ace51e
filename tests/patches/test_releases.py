"""The patches on the model file of each release that the README's table names.

The wheels come from the package registry that also installs the tests' own requirements.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import pytest

from hangdoctor.check.model import PatchedFile, Subject
from hangdoctor.check.reading import read
from hangdoctor.check.verdict import judge
from hangdoctor.patches import PATCHES, PatchRefusedError, transform
from hangdoctor.patches.files import MODEL_FILE

README = Path(__file__).parents[2] / "README.md"
ROW = re.compile(r"^\| (\d[\w.]*) \| (applies|refused) \| (applies|refused) \|$", re.MULTILINE)
RELEASES = {version: said for version, *said in ROW.findall(README.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def model_files(tmp_path_factory):
    """Return the text of each release's deepseek_v2.py."""
    into = tmp_path_factory.mktemp("wheels")

    def fetch(version):
        done = subprocess.run(
            [
                sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", into,
                "--only-binary=:all:", "--python-version=312", "--platform=any",
                "--platform=manylinux_2_34_x86_64", f"sglang=={version}",
            ],
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        wheels = list(into.glob(f"sglang-{version}-*.whl"))
        if not wheels:
            return version, done.stderr
        with zipfile.ZipFile(wheels[0]) as wheel:
            text = wheel.read("sglang/srt/models/deepseek_v2.py").decode()
        wheels[0].unlink()
        return version, text

    with ThreadPoolExecutor(4) as pool:
        return dict(pool.map(fetch, RELEASES))


def test_the_table_has_the_releases_that_are_promised():
    assert {"0.5.8", "0.5.9", "0.5.10.post1", "0.5.12", "0.5.15.post1", "0.5.16"} < set(RELEASES)


@pytest.mark.parametrize("version", RELEASES)
def test_a_release_is_patched_or_refused_as_the_table_says(version, model_files):
    text = model_files[version]
    assert "class DeepseekV2Model" in text, f"the registry gives no wheel: {text}"
    for patch, said in zip(PATCHES, RELEASES[version], strict=True):
        if said == "refused":
            with pytest.raises(PatchRefusedError, match="not found: "):
                transform(patch.name, text)
        else:
            compile(transform(patch.name, text).source, "deepseek_v2.py", "exec")


@pytest.mark.parametrize(
    ("patch", "kind"), [("hs-dump-v1", "invasive"), ("hs-dump-v2", "no-difference")]
)
def test_a_release_whose_layers_fill_the_list_of_aux_states_reads_as_it_runs(
    patch, kind, model_files
):
    # SGLang 0.5.15 on one H200: v1 and v2 came up, v1 with wider hidden states.
    stock = model_files["0.5.15"]
    made = transform(patch, stock)
    files = [PatchedFile(path=MODEL_FILE, stock=stock, text=made.source)]
    folder = PurePosixPath(MODEL_FILE).parent
    files += [
        PatchedFile(path=str(folder / name), stock=None, text=text)
        for name, text in made.companions
    ]
    subject = Subject(name="mine", title="", files=tuple(files))
    assert judge(subject, read(subject, None)).kind == kind
