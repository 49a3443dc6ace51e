"""The shipped patches in real servers: what they dump, and what they answer."""

from __future__ import annotations

import json
import time
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import sglang_lab
from tensors import read

from hangdoctor.patches.dumps import read_dumps

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 64
LAYERS = (1, 2, 4)
PROMPTS = (tuple(range(40, 52)), tuple(range(100, 107)), tuple(range(70, 80)))
CHUNK = 32
LONG = tuple(range(200, 290))
LAST = (7, 8, 9)
GREEDY = {"temperature": 0, "max_new_tokens": 5}
TOLERANCE = 1e-5
"""Of a state in a batch of several requests, against alone: other blocks in the products."""


@dataclass
class Answers:
    """What a server said to the same questions, and what it wrote meanwhile.

    Attributes:
        tokens: that each request got.
        hidden: rows that return_hidden_states gave for the first prompt.
        batches: of the dumps; each a list of requests, which are tokens, prefix and named rows.
    """

    tokens: list[list[int]]
    hidden: list[list[float]]
    log: str
    folder: Path
    batches: list[list[tuple[tuple[int, ...], int, dict[str, list[list[float]]]]]]


def test_v1_and_v2_dump_the_same_states_and_v1_alone_changes_what_is_returned(lab):
    v2, v1 = (ask_server(lab, variant) for variant in ("hs-dump-v2", "hs-dump-v1"))
    assert v1.tokens == v2.tokens

    # v1 changes what return_hidden_states gives, v2 does not.
    assert [len(row) for row in v2.hidden] == [WIDTH] * len(PROMPTS[0])
    assert [len(row) for row in v1.hidden] == [WIDTH * len(LAYERS)] * len(PROMPTS[0])

    for server in (v1, v2):
        # TP0 alone writes, and nothing while it decodes: all requests are prompts.
        found = read_dumps(server.folder)
        assert found.all_right, found
        assert {file.metadata["tp_rank"] for file in found.files} == {"0"}
        assert len({file.writer for file in found.files}) == 1
        assert server.log.count("hidden states of layers [1, 2, 4] go to") == 1
        asked = {*PROMPTS, *chunks(LONG)}
        seen = [ids for batch in server.batches for ids, prefix, _ in batch if prefix % CHUNK == 0]
        assert set(seen) == asked
        # What an earlier chunk or the radix cache has is told: of the long prompt, and of the last.
        noted = [file for file in found.files if file.doubts]
        assert len(noted) == len(chunks(LONG)) - 1 + 1

    # Alone, the two patches' states are the same to the last bit, and what v1's server returned.
    for prompt in PROMPTS:
        assert of(v1, prompt)[0] == of(v2, prompt)[0]
    rows = of(v2, PROMPTS[0])[0]
    side_by_side = [
        [value for layer in LAYERS for value in rows[f"layer.{layer}"][index]]
        for index in range(len(PROMPTS[0]))
    ]
    assert side_by_side == v1.hidden
    assert rows["final"] == v2.hidden

    # A batch of several requests is taken apart by seq_lens; each is as it is alone.
    assert max(len(batch) for batch in v2.batches) > 1
    for prompt in PROMPTS:
        alone, *others = of(v2, prompt)
        for other in others:
            for name, wanted in alone.items():
                for one, two in zip(wanted, other[name], strict=True):
                    assert two == pytest.approx(one, abs=TOLERANCE), (prompt, name)


def ask_server(lab, variant):
    """Ask a server and end it: one that idles takes a core for each of its ranks."""
    options = ["--enable-return-hidden-states", "--chunked-prefill-size", str(CHUNK)]
    server = lab.launch(variant, extra_args=[*options, "--skip-server-warmup"])
    server.wait_for(r"Uvicorn running on")
    try:
        return ask_one(server)
    except OSError as error:
        raise AssertionError(f"{error}; the log ends:\n{server.log()[-3000:]}") from error
    finally:
        sglang_lab.end_session(server.pid)


def ask_one(server):
    first, *others = PROMPTS
    answers = [ask(server, input_ids=first, return_hidden_states=True)]
    hidden = answers[0]["meta_info"]["hidden_states"][0]
    answers += [ask(server, input_ids=prompt) for prompt in others]
    ask(server, "flush_cache")
    answers += ask(server, input_ids=PROMPTS)
    answers.append(ask(server, input_ids=LONG))
    answers.append(ask(server, input_ids=(*LONG[:50], *LAST)))
    return Answers(
        tokens=[answer["output_ids"] for answer in answers],
        hidden=hidden,
        log=server.log(),
        folder=server.dump_dir,
        batches=batches_of(server),
    )


def ask(server, path="generate", **body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/{path}",
        data=json.dumps(body | {"sampling_params": GREEDY}).encode(),
        headers={"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=120) as answer:
        text = answer.read()
    return json.loads(text) if path == "generate" else text


def batches_of(server):
    """Return the batches, once the thread that writes has come to the last."""
    end_s = time.monotonic() + 60
    while True:
        files = sorted(server.dump_dir.glob("*.safetensors"))
        batches = [requests_of(path) for path in files]
        if "hs-dump" not in str(server.log_path) or (
            batches and batches[-1][-1][0][-len(LAST) :] == LAST
        ):
            return batches
        assert time.monotonic() < end_s, "the last batch was not written"
        time.sleep(0.1)  # between two looks; nothing rests on its length


def requests_of(path):
    """Take a batch apart by its seq_lens."""
    tensors, _ = read(path)
    found, at = [], 0
    for length, prefix in zip(tensors["seq_lens"][1], tensors["prefix_lens"][1], strict=True):
        rows = {}
        for name, ((_, *width), values) in tensors.items():
            if width:
                (wide,) = width
                part = values[at * wide : (at + length) * wide]
                rows[name] = [part[index : index + wide] for index in range(0, len(part), wide)]
        found.append((tuple(tensors["input_ids"][1][at : at + length]), prefix, rows))
        at += length
    return found


def of(server, prompt):
    """Return the rows of a prompt's requests, in the order that they were asked."""
    return [rows for batch in server.batches for ids, _, rows in batch if ids == prompt]


def chunks(prompt):
    return [prompt[at : at + CHUNK] for at in range(0, len(prompt), CHUNK)]
