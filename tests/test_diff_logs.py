"""`hangdoctor diff-logs` as scripts rely on it: exit codes, forms, and every kind of input."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
from pathlib import Path

import pytest
from test_cli import assert_complaint, assert_harmless, hangdoctor, shell

SAMPLES = Path(__file__).parents[1] / "sample_logs"
GOOD = SAMPLES / "sglang-0.5.15-tp2-good.log"
HUNG = SAMPLES / "sglang-0.5.15-tp2-weights-hung.log"
CPU_GOOD = SAMPLES / "sglang-0.5.9-cpu-tp2-good.log"
FAILED = SAMPLES / "sglang-0.5.9-cpu-tp2-shard-damaged.log"
HOSTILE = "\x1b[2Jgone\u202egnp\x9b31m <script>alert(1)</script> `x` | a"


def _zstd():
    try:
        from compression import zstd
    except ImportError:
        return None
    return zstd.compress


@pytest.mark.parametrize(
    ("logs", "code", "first"),
    [
        ((GOOD, GOOD), 0, "REACHES every milestone of the good log "),
        ((GOOD, HUNG), 1, "STOPS in weights: TP1"),
        ((GOOD, GOOD, HUNG), 1, "STOPS in weights: TP1"),
        ((CPU_GOOD, FAILED), 1, "FAILS in weights"),
    ],
)
def test_the_exit_code_says_whether_the_last_log_reaches_all(logs, code, first):
    done = hangdoctor("diff-logs", *logs)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.startswith(first)


def test_the_text_begins_with_the_answer_and_ends_with_what_to_look_at_next():
    out = hangdoctor("diff-logs", GOOD, HUNG).stdout
    head = out.split("\n\n")[0]
    assert "TP1 lacks 'Load weight begin.', which the good log has at 00:41 (line 37)" in head
    assert "last of TP1: line 36 at 21:49:01" in head
    assert "no rank has come to a forward of the model" in " ".join(head.split())
    assert out.split("\n\n")[-1].startswith("Next\n  1. ")
    assert f"hangdoctor diagnose PID --log {HUNG} --record DIR" in out


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_the_text_fits_the_terminal(columns):
    done = hangdoctor("diff-logs", GOOD, HUNG, env=os.environ | {"COLUMNS": columns})
    wide = [line for line in done.stdout.splitlines() if len(line) > int(columns)]
    assert not [line for line in wide if " " in line.strip() and "hangdoctor diagnose" not in line]


def test_json_is_one_document():
    done = hangdoctor("diff-logs", GOOD, HUNG, "--format=json")
    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert (document["schema"], document["outcome"], document["phase"]) == (1, "stops", "weights")
    assert document["culprits"] == ["TP1"]
    assert document["first_missing"]["id"] == "weights-begin"
    assert [each["role"] for each in document["logs"]] == ["good", "other"]
    assert [each["rank"] for each in document["ranks"]] == ["launch", "TP0", "TP1"]
    assert document["ranks"][2]["missing"][0]["text"] == "Load weight begin."
    assert document["ranks"][2]["good_goes_on"][0]["number"] == 37
    assert {each["phase"] for each in document["phases"]} >= {"start", "weights", "warmup"}
    assert document["next"][0]["command"].startswith("hangdoctor diagnose PID")


def test_html_shows_the_lines_of_a_rank_side_by_side_and_markdown_goes_into_an_issue(tmp_path):
    page, note = tmp_path / "page.html", tmp_path / "note.md"
    assert hangdoctor("diff-logs", GOOD, HUNG, "--format=html", "-o", page).stdout == ""
    html = page.read_text()
    assert html.startswith("<!doctype html>")
    assert "<details open><summary>TP1</summary>" in html
    assert "class=gone" in html
    assert not re.search(r"(?:src|href)=", html)  # it needs nothing else
    hangdoctor("diff-logs", GOOD, HUNG, "--format=markdown", "--output", note)
    text = note.read_text()
    assert text.startswith("### STOPS in weights: TP1\n")
    assert "| TP1 | 2 of 9 | Load weight begin. | 00:41 |" in text
    assert "```diff\n" in text


def test_lists_are_cut_unless_all_is_asked_for_and_ranks_and_context_can_be_chosen():
    other = SAMPLES / "sglang-0.5.23-cpu-tp2-good.log"
    short = hangdoctor("diff-logs", CPU_GOOD, other).stdout
    long = hangdoctor("diff-logs", CPU_GOOD, other, "--all").stdout
    assert "(--all)" in short
    assert "(--all)" not in long
    assert long.count("\n") > short.count("\n") + 100
    one = hangdoctor("diff-logs", GOOD, HUNG, "--ranks=TP0", "--context=1").stdout
    ranks = one.split("\nRanks ")[1].split("\n\n")[0]
    assert "\n  TP0 " in ranks
    assert "\n  TP1 " not in ranks
    assert len(one.split("how the good log goes on\n")[1].split("\n\n")[0].splitlines()) == 2
    none = hangdoctor("diff-logs", GOOD, HUNG, "--context=0").stdout
    assert "how the good log goes on" not in none


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress], ids=["gz", "xz"])
def test_packed_logs_are_read_by_their_content(tmp_path, pack):
    good, hung = tmp_path / "good", tmp_path / "hung"
    good.write_bytes(pack(GOOD.read_bytes()))
    hung.write_bytes(pack(HUNG.read_bytes()))
    done = hangdoctor("diff-logs", good, hung)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("STOPS in weights: TP1")
    assert hangdoctor("diagnose", hung).stdout.startswith("UNKNOWN in weights: TP1")
    assert hangdoctor("diagnose", hung, "--good", good).returncode == 3


def test_a_log_that_is_packed_with_zstd_is_read_or_the_command_that_unpacks_it_is_said(tmp_path):
    log = tmp_path / "a log.zst"
    compress = _zstd()
    log.write_bytes(compress(HUNG.read_bytes()) if compress else b"\x28\xb5\x2f\xfd" + bytes(40))
    done = hangdoctor("diff-logs", GOOD, log)
    if compress:
        assert done.stdout.startswith("STOPS in weights: TP1")
    else:
        assert_complaint(done, 2, "zstd", f"zstd -dc '{log}' | hangdoctor ... -")


def test_a_packed_log_that_breaks_off_is_read_as_far_as_it_goes(tmp_path):
    log = tmp_path / "hung.gz"
    packed = gzip.compress(os.urandom(40_000).hex().encode() + b"\n" + HUNG.read_bytes())
    log.write_bytes(packed[:-400])
    done = hangdoctor("diff-logs", GOOD, log, "--engine=sglang")
    assert "breaks off" in done.stderr
    log.write_bytes(packed[:30])
    assert_complaint(hangdoctor("diff-logs", GOOD, log), 2, "cannot unpack")


def test_one_log_can_come_from_stdin_and_one_from_a_pipe():
    done = shell(f'"$@" - {HUNG} < {GOOD}', "diff-logs")
    assert (done.returncode, done.stdout[:21]) == (1, "STOPS in weights: TP1")
    done = shell(f'"$@" {GOOD} <(cat {HUNG})', "diff-logs")
    assert (done.returncode, done.stdout[:21]) == (1, "STOPS in weights: TP1"), done.stderr
    assert_complaint(hangdoctor("diff-logs", "-", "-"), 2, "stdin")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([GOOD], ["good log and another"]),
        ([HUNG, GOOD], ["not the log of a good start", "good logs come first"]),
        ([GOOD, "/no/such/log"], ["/no/such/log", "ls -l"]),
        ([GOOD, "/etc/hostname"], ["not recognised", "--engine sglang"]),
        ([GOOD, "/etc/hostname", "--engine=sglang"], ["holds no line"]),
        ([GOOD, "/dev/null"], ["no file"]),
        ([GOOD, HUNG, "--engine=none"], ["there is no engine"]),
        ([GOOD, HUNG, "--ranks=TP7"], ["no rank TP7", "TP0,TP1"]),
        ([GOOD, HUNG, "--ranks="], ["no rank"]),
        ([GOOD, HUNG, "--format=pdf"], ["pdf"]),
        ([GOOD, HUNG, "--context=-1"], ["context"]),
        ([GOOD, HUNG, "-o", "/no/such/directory/out"], ["/no/such/directory/out"]),
    ],
)
def test_what_cannot_be_compared_is_2_with_a_hint(arguments, words):
    assert_complaint(hangdoctor("diff-logs", *arguments), 2, *words)


def test_an_empty_log_and_a_pipe_that_nobody_writes_are_2_as_well(tmp_path):
    empty, fifo = tmp_path / "empty", tmp_path / "fifo"
    empty.touch()
    os.mkfifo(fifo)
    assert_complaint(hangdoctor("diff-logs", GOOD, empty), 2, "empty")
    assert_complaint(hangdoctor("diff-logs", GOOD, fifo), 2, "nobody writes")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_answer_that_cannot_be_written_is_2():
    assert_complaint(hangdoctor("diff-logs", GOOD, HUNG, "-o", "/dev/full"), 2, "/dev/full")


@pytest.mark.parametrize("output", ["text", "json", "html", "markdown"])
def test_nothing_that_a_log_says_is_obeyed_and_no_secret_is_shown(tmp_path, output):
    log = tmp_path / "log"
    text = HUNG.read_text().replace("api_key=None", "api_key='sk-hush-hush'")
    assert "sk-hush-hush" in text
    stamp = "[2026-11-29 21:49:02 TP0] "
    log.write_text(f"{text}\n{stamp}{HOSTILE}\n{stamp}RuntimeError: {HOSTILE}\n")
    done = hangdoctor("diff-logs", GOOD, log, "--all", f"--format={output}")
    assert done.returncode == 1
    assert_harmless(done.stdout)
    assert "gone" in done.stdout
    assert "sk-hush-hush" not in done.stdout
    if output == "html":
        assert "<script>" not in done.stdout
