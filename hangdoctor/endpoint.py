"""Where a server listens, who holds that port and until when, and one request with a deadline.

Nothing here uses a proxy of the environment: `http.client` knows none.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shlex
import socket
import ssl
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from hangdoctor.collect import procfs
from hangdoctor.errors import InputError, UsageError
from hangdoctor.model import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_T = TypeVar("_T")

PROMPT = "The capital of France is"
TOKENS = 8
COMPLETIONS, GENERATE, MODELS = "/v1/completions", "/generate", "/v1/models"
MOST_BYTES = 1 << 20
"""An answer is no longer; one that never ends must not fill our memory."""

CLOSED_S = 5.0
"""A listening socket is gone with its process."""

_PROC = "/proc"
_PORTS = range(11000, 20000)
_SGLANG_COUNTS = (0, 10000, *range(233, 240))
"""Ports that SGLang 0.5.15 counts from its own: gRPC's, which it refuses above 65,535 though gRPC
is off, and seven of DP attention (server_args.py)."""
_URL = "hangdoctor smoke --url http://127.0.0.1:30000 -- COMMAND ..."
_ABSENT = (404, 405)
_CONNECT_S = 1.0
_PAUSE_S = 0.2
_QUOTED = 200
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}  # noqa: S104  # what a server is told


class Endpoint(Struct, frozen=True):
    """Where a server answers.

    Attributes:
        host: a name or an address, without brackets.
        path: what stands before the paths of the API, or one of `COMPLETIONS` and `GENERATE` at
            its end, which is then the one to ask.
        api_key: "" for none.
        local: the command is what listens there.
    """

    host: str
    port: int
    scheme: str = "http"
    path: str = ""
    api_key: str = ""
    local: bool = True

    @property
    def url(self) -> str:
        """Return it as a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


class Answer(Struct, frozen=True):
    """What came of a request.

    Attributes:
        ok: it was answered with text.
        said: what came, or what was wrong with it, in one sentence.
        request: method and path; took_s: how long it took.
        text: of the completion.
    """

    ok: bool
    said: str
    request: str = ""
    took_s: float = 0.0
    text: str = ""


def endpoint_of(command: Sequence[str], default_port: int | None, url: str | None) -> Endpoint:
    """Return where the server of a command will listen, by its arguments or by a URL.

    Raises:
        UsageError: neither tells, or they are wrong.

    >>> endpoint_of(["sh", "-c", "run --port=31000 --host 0.0.0.0"], None, None).url
    'http://127.0.0.1:31000'
    >>> endpoint_of(["run", "--host", "::", "--api-key", "k"], 30000, None).url
    'http://[::1]:30000'
    >>> endpoint_of(["run"], None, "localhost:8000/v1/completions").path
    '/v1/completions'
    """
    words = [*_words(command)]
    api_key = _value(words, "--api-key") or ""
    if url is not None:
        return _from_url(url, api_key)
    port = _value(words, "--port")
    if port is None and default_port is None:
        raise UsageError(
            "the command does not say on which port its server listens",
            hint=_URL,
        )
    host = _value(words, "--host") or "127.0.0.1"
    host = host.removeprefix("[").removesuffix("]")
    return Endpoint(
        host=_ANY.get(host, host),
        port=_port(port or default_port, "--port"),
        scheme="https" if _value(words, "--ssl-certfile") else "http",
        api_key=api_key,
    )


def is_open(endpoint: Endpoint) -> bool:
    """Tell whether somebody listens there now."""
    with contextlib.suppress(OSError):
        if endpoint.local and procfs.read_listeners(_PROC, os.getpid(), endpoint.port):
            return True
    try:
        with socket.create_connection((endpoint.host, endpoint.port), _CONNECT_S):
            return True
    except OSError:
        return False


def closes(endpoint: Endpoint) -> bool:
    """Wait until nobody listens there any more; tell whether that came in `CLOSED_S`."""
    until_s = time.monotonic() + CLOSED_S
    while is_open(endpoint):
        if time.monotonic() >= until_s:
            return False
        time.sleep(_PAUSE_S)
    return True


def free_port() -> int:
    """Return a port for a server, with those free that SGLang counts from it.

    Kernels give ports away by themselves from 32,768 on: all of these lie below.

    Raises:
        InputError: no port of its range is free.
    """
    ports = list(_PORTS)
    random.shuffle(ports)
    for port in ports:
        if all(_is_free(port + further) for further in _SGLANG_COUNTS):
            return port
    raise InputError(
        f"no port from {_PORTS[0]} to {_PORTS[-1]} is free for a server",
        hint="ss -ltn: end servers that were left over",
    )


def holder(endpoint: Endpoint) -> str:
    """Say which process listens on the port, as far as it can be seen; "" where it cannot."""
    with contextlib.suppress(OSError):
        inodes = procfs.read_listeners(_PROC, os.getpid(), endpoint.port)
        pid = procfs.find_holder(_PROC, (), inodes) if inodes else None
        stat = procfs.read_stat(_PROC, pid) if pid is not None else None
        if stat is not None:
            return f"pid {stat.pid} ({stat.comm})"
    return ""


def ask(endpoint: Endpoint, within_s: float) -> Answer:
    """Ask for one short greedy completion; a server that does not listen yet is waited for.

    OpenAI's API is asked where it lists a model, else SGLang's own. Blocks for `within_s` at
    most between two blocks of the answer; whoever must be certain asks in a thread.
    """
    began_s = time.monotonic()
    until_s = began_s + within_s
    prefix, only = endpoint.path.rstrip("/"), ""
    for path in (COMPLETIONS, GENERATE):
        if prefix.endswith(path):
            prefix, only = prefix.removesuffix(path), path
    prefix = prefix.removesuffix("/v1")
    request = "GET " + prefix + MODELS
    try:
        path, body = GENERATE, _generate()
        if only != GENERATE:
            status, raw = _talk(endpoint, "GET", prefix + MODELS, None, until_s)
            if only or status not in _ABSENT:
                if status != http.HTTPStatus.OK:
                    return _wrong(request, began_s, _http(status, raw))
                path, body = COMPLETIONS, _complete(_model(raw))
        request = f"POST {prefix}{path}"
        status, raw = _talk(endpoint, "POST", prefix + path, body, until_s)
        if status != http.HTTPStatus.OK:
            return _wrong(request, began_s, _http(status, raw))
        text = _text(raw)
    except (OSError, http.client.HTTPException) as error:
        return _wrong(request, began_s, f"no answer: {_reason(error)}")
    except ValueError as error:
        return _wrong(request, began_s, str(error))
    if not text:
        return _wrong(request, began_s, "the answer's text is empty")
    took_s = time.monotonic() - began_s
    said = f"{request} was answered: {text[:_QUOTED]!r}"
    return Answer(ok=True, said=said, request=request, took_s=took_s, text=text)


def in_thread(question: Callable[[], _T]) -> Future[_T]:
    """Ask in a thread of its own; return what will hold the answer, or the error.

    Not in a pool's, for whose threads the end of Python waits: the answer may never come.
    """
    answer: Future[_T] = Future()
    threading.Thread(target=_settle, args=(answer, question), daemon=True).start()
    return answer


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that lingers is free
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _settle(answer: Future[_T], question: Callable[[], _T]) -> None:
    try:
        answer.set_result(question())
    except Exception as error:  # noqa: BLE001  # raised again where the answer is taken
        answer.set_exception(error)


def _talk(
    endpoint: Endpoint, method: str, path: str, body: dict[str, Any] | None, until_s: float
) -> tuple[int, bytes]:
    """Return status and body of a response.

    Raises:
        OSError, http.client.HTTPException: there is none in time.
    """
    headers = {"Accept": "application/json", "Connection": "close"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    while True:
        connection = _connection(endpoint, max(0.1, until_s - time.monotonic()))
        with contextlib.closing(connection):
            try:
                connection.connect()
            except ConnectionRefusedError:  # "ready" is said just before it listens
                if time.monotonic() + _PAUSE_S > until_s:
                    raise
                time.sleep(_PAUSE_S)
                continue
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, path, payload, headers)
            response = connection.getresponse()
            return response.status, response.read(MOST_BYTES)


def _connection(endpoint: Endpoint, timeout_s: float) -> http.client.HTTPConnection:
    if endpoint.scheme != "https":
        return http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)
    context = ssl.create_default_context()
    if endpoint.local:  # a certificate for the name that others know it by
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(
        endpoint.host, endpoint.port, timeout=timeout_s, context=context
    )


def _complete(model: str) -> dict[str, Any]:
    # ignore_eos, which SGLang and vLLM know, since a base model may have nothing to say.
    return {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }


def _generate() -> dict[str, Any]:
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {"text": PROMPT, "sampling_params": sampling}


def _model(raw: bytes) -> str:
    """Return the first model of a list of them.

    Raises:
        ValueError: there is none.
    """
    found = _json(raw)
    with contextlib.suppress(KeyError, IndexError, TypeError):
        if isinstance(name := found["data"][0]["id"], str):
            return name
    raise ValueError(f"{MODELS} lists no model: {_quoted(raw)}")


def _text(raw: bytes) -> str:
    """Return the text of a completion, of OpenAI's form or of SGLang's.

    Raises:
        ValueError: there is none.

    >>> _text(b'{"choices": [{"text": " Paris"}]}'), _text(b'{"text": " Paris"}')
    (' Paris', ' Paris')
    """
    found = _json(raw)
    with contextlib.suppress(KeyError, IndexError, TypeError):
        if isinstance(found, list):
            found = found[0]
        text = found["choices"][0]["text"] if "choices" in found else found["text"]
        if isinstance(text, str):
            return text
    raise ValueError(f"the answer holds no text: {_quoted(raw)}")


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the answer is not JSON: {_quoted(raw)}") from error


def _http(status: int, raw: bytes) -> str:
    return f"HTTP {status}: {_quoted(raw)}"


def _quoted(raw: bytes) -> str:
    return raw[:_QUOTED].decode(errors="replace").strip() or "(nothing)"


def _wrong(request: str, began_s: float, said: str) -> Answer:
    took_s = time.monotonic() - began_s
    return Answer(ok=False, said=f"{request}: {said}", request=request, took_s=took_s)


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _from_url(url: str, api_key: str) -> Endpoint:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError as error:
        raise UsageError(f"--url {url!r}: {error}", hint=_URL) from None
    # A word alone is more likely a slip than a host that serves on port 80.
    if port is None or not parts.hostname or ("://" not in url and parts.port is None):
        raise UsageError(f"--url takes the address of a server, not {url!r}", hint=_URL)
    return Endpoint(
        host=_ANY.get(parts.hostname, parts.hostname),
        port=_port(port, "--url"),
        scheme=parts.scheme,
        path=parts.path.rstrip("/"),
        api_key=api_key or parts.password or "",
        local=_ANY.get(parts.hostname, parts.hostname) in ("127.0.0.1", "::1", "localhost"),
    )


def _port(text: str | int | None, option: str) -> int:
    with contextlib.suppress(ValueError, TypeError):
        if 0 < (port := int(text or 0)) < 1 << 16:
            return port
    raise UsageError(f"{option} of the command is no port: {text!r}", hint=_URL)


def _words(command: Sequence[str]) -> Iterator[str]:
    """Return the command's words, and those of a script that is one of them (sh -c)."""
    for word in command:
        if any(character.isspace() for character in word) and "--" in word:
            try:
                yield from shlex.split(word)
            except ValueError:
                yield from word.split()
        else:
            yield word


def _value(words: Sequence[str], option: str) -> str | None:
    """Return the last value of an option, after a blank or "="."""
    found = None
    for index, word in enumerate(words):
        if word == option and index + 1 < len(words):
            found = words[index + 1]
        elif word.startswith(option + "="):
            found = word.removeprefix(option + "=")
    return found
