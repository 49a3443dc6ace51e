from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangdoctor.logs.align import common
from hangdoctor.logs.arguments import arguments
from hangdoctor.logs.templates import KNOWN_LIMIT, Masker, mask

DIRECTORY = Path(__file__).parents[2] / "sample_logs"
WORDS = st.sampled_from(
    re.findall(
        r"\S+",
        "12 8x120 fa3 bf16 TP0 rank12 0x7f /a/b1.py:7 10.0.0.1:80 a deadbeef0123 http://x1/y"
        " [1, 2,3] = -4.5e-3 0 # 5% v2_1 é1 ,",
    )
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("KV Cache is allocated. #tokens: 10716828", "KV Cache is allocated. #tokens: 2048"),
        ("bs=[1, 2, 4], avail mem=68.45 GB", "bs=[1, 2, 4, 8], avail mem=9 GB"),
        ("read /models/a/x-00001.safetensors", "read /data/b/c/y-2.safetensors"),
        ("TP rank 3 could finish, TP3 at cuda:3", "TP rank 11 could finish, TP11 at cuda:0"),
        ("id 4f9a31bc04d2 at 0x7f3a", "id 00aa31bc04d2ff at 0xdead"),
        ("took 12.5 s at 20:41:51", "took 3 s at 01:02:03"),
        ("127.0.0.1:46472 - GET", "10.2.3.4:80 - GET"),
    ],
)
def test_what_differs_from_launch_to_launch_is_masked(one, other):
    assert mask(one) == mask(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Use fa3 backend by default.", "Use fa4 backend by default."),
        ("dtype: torch.bfloat16", "dtype: torch.float16"),
        ("compiled for sm90", "compiled for sm120"),
        ("Using fp8 KV cache", "Using fp4 KV cache"),
        ("/a/awq.py:1: x", "/a/gguf.py:1: x"),
    ],
)
def test_digits_that_belong_to_a_word_are_kept(one, other):
    assert mask(one) != mask(other)


@given(
    st.lists(
        st.lists(WORDS | st.just(" ") | st.text(max_size=8), max_size=8).map("".join), max_size=20
    )
)
def test_the_masker_that_remembers_gives_what_the_plain_one_gives(texts):
    masker = Masker()
    for text in [*texts, *texts]:
        assert masker(text) == mask(text)


def test_the_masker_gives_what_the_plain_one_gives_on_real_logs():
    masker = Masker()
    for path in DIRECTORY.glob("*.log"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert masker(line) == mask(line)


def test_a_masker_forgets_before_it_grows_without_end():
    masker = Masker()
    for number in range(KNOWN_LIMIT + 10):
        masker("a" * (number % 300) + " " + chr(0x4E00 + number // 300))
    assert len(masker._known) <= KNOWN_LIMIT


def _length(first, second):
    """The length of a longest common subsequence, by the plain table."""
    row = [0] * (len(second) + 1)
    for item in first:
        above, row = row, [0]
        for j, other in enumerate(second):
            row.append(above[j] + 1 if item == other else max(above[j + 1], row[j]))
    return row[-1]


@given(st.text("abc", max_size=40), st.text("abcd", max_size=40))
def test_an_alignment_is_a_longest_common_subsequence(first, second):
    pairs = common(first, second)
    assert all(first[i] == second[j] for i, j in pairs)
    assert pairs == sorted(pairs)
    assert len({i for i, _ in pairs}) == len({j for _, j in pairs}) == len(pairs)
    assert len(pairs) == _length(first, second)


@given(st.text("abc", max_size=40))
def test_a_sequence_is_aligned_with_itself_line_by_line(text):
    assert common(text, text) == [(index, index) for index in range(len(text))]


@pytest.mark.parametrize("path", sorted(DIRECTORY.glob("*.log")), ids=lambda path: path.stem)
def test_the_arguments_of_a_real_launch_are_taken_apart(path):
    line = next(x for x in path.read_text(encoding="utf-8").splitlines() if "server_args=" in x)
    found = arguments(line)
    assert len(found) > 300
    assert found["model_path"].startswith("'/models/")
    assert found["tp_size"].isdigit()
    assert all(name.isidentifier() for name in found)


@given(st.text("(){}[]'\"\\,=: ab1", max_size=60))
def test_arguments_that_are_cut_or_damaged_break_nothing(text):
    assert isinstance(arguments("server_args=ServerArgs(" + text), dict)
    assert isinstance(arguments("server_args={" + text), dict)
