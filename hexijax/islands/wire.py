"""JSON between the launcher and its islands, over a socket that both have proved.

    server: nonce -> client: nonce, proof -> server: proof -> messages, each with a tag

Both sides hold one secret, the run's token. It never travels: each shows by an HMAC
over both nonces that it knows it, and the keys of the tags follow from the same. So
nobody without it can speak, change, repeat or reorder a message; who can read the
network can read them. Nothing is ever unpickled.
"""

import contextlib
import errno
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from hexijax.errors import UserError

PROTOCOL = 1
"""Grows when islands of one version cannot speak to a launcher of another."""

MOST_BYTES = 256 * 2**20
"""Of a message; the largest holds a plan with its chain and cluster."""

TOKEN = "HEXIJAX_TOKEN"
"""The environment variable that holds a run's token."""

LEAST_TOKEN = 16
"""Characters of a token."""

_HELLO_BYTES = 4096
_LENGTH = struct.Struct(">I")
_TAG_BYTES = hashlib.sha256().digest_size

Message = dict[str, Any]
"""What travels: a JSON object."""


class Closed(Exception):
    """The other side has gone, or said something it could not have said."""


class Refused(UserError):
    """The other side does not take us."""


def new_token() -> str:
    """A secret for one run."""
    return secrets.token_hex(32)


def checked(token: str) -> str:
    """A token that a person gave.

    Raises:
      UserError: it can be guessed.
    """
    if len(token) < LEAST_TOKEN or len(set(token)) < LEAST_TOKEN // 2:
        raise UserError(
            f"{TOKEN} has {len(token)} characters, {len(set(token))} of them unlike, "
            f"and needs {LEAST_TOKEN} and {LEAST_TOKEN // 2}: whoever guesses it can "
            "take part. `openssl rand -hex 32` makes a good one."
        )
    return token


def derived(token: str, *parts: str | int) -> bytes:
    """32 bytes that only those who know the token can know."""
    text = "\x1f".join(map(str, parts))
    return hmac.digest(token.encode(), text.encode(), "sha256")


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` in two; an IPv6 host may stand in brackets.

    Raises:
      UserError: it is none.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise UserError(
            f"{address!r} is no address: HOST:PORT is needed, as 127.0.0.1:7010; port "
            "0 lets the system choose one."
        )
    return host.strip("[]"), int(port)


def joined(host: str, port: int) -> str:
    """``host:port``, which ``split_address`` takes apart again."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family(host: str) -> socket.AddressFamily:
    """Of a numeric address or a name: a colon is in those of version 6 alone."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Line:
    """One end of a connection on which both sides have proved themselves."""

    def __init__(self, connection: socket.socket, out_key: bytes, in_key: bytes):
        self.socket = connection
        """For what is no message; both sides have to know when."""
        self._out_key, self._in_key = out_key, in_key
        self._sent = self._received = 0
        self._lock = threading.Lock()

    @property
    def host(self) -> str:
        """This side's own address."""
        return str(self.socket.getsockname()[0])

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one; from any thread.

        Raises:
          Closed: the other side has gone.
        """
        data = json.dumps(message).encode()
        assert len(data) <= MOST_BYTES, f"a message of {len(data)} bytes"
        try:
            with self._lock:
                tag = _tag(self._out_key, self._sent, data)
                self._sent += 1
                self.socket.sendall(_LENGTH.pack(len(data)) + tag + data)
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self) -> Message:
        """Waits for the next; one thread at a time.

        Raises:
          Closed: none will come.
        """
        head = _read(self.socket, _LENGTH.size + _TAG_BYTES)
        (size,) = _LENGTH.unpack_from(head)
        if size > MOST_BYTES:
            raise Closed(f"a message of {size:,} bytes was announced")
        data = _read(self.socket, size)
        tag = _tag(self._in_key, self._received, data)
        if not hmac.compare_digest(tag, head[_LENGTH.size :]):
            raise Closed("a message was changed on its way")
        self._received += 1
        message = json.loads(data)
        if not isinstance(message, dict):
            raise Closed("a message was no object")
        return message

    def close(self) -> None:
        """Ends it; who waits for a message here is told."""
        shut(self.socket)


def listen(address: str) -> socket.socket:
    """A socket that takes callers at ``host:port``; port 0: any.

    Raises:
      UserError: nobody can listen there.
    """
    host, port = split_address(address)
    server = socket.socket(family(host), socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
        server.listen(128)
    except OSError as error:
        server.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"Port {port} of {host} is in use, perhaps by another launch. Name "
                "another with --listen HOST:PORT; port 0 takes one that is free."
            ) from error
        raise UserError(
            f"Nothing can listen at {address}: {error.strerror}. --listen takes an "
            "address of this machine."
        ) from error
    return server


def call(address: str, token: str, seconds: float) -> Line:
    """Connects to a rendezvous.

    Raises:
      OSError: nobody listens there.
      Refused: who listens there has another token, or none.
    """
    host, port = split_address(address)
    until = time.monotonic() + seconds
    connection = socket.create_connection((host, port), timeout=seconds)
    try:
        _plain(connection)
        hello = _read_hello(connection, until)
        if hello.get("hexijax") != PROTOCOL:
            raise Refused(
                f"{address} speaks protocol {hello.get('hexijax')} and this island "
                f"{PROTOCOL}. Give launcher and islands one version of hexijax."
            )
        theirs, ours = _word(hello, "nonce"), secrets.token_hex(16)
        proof = derived(token, "island", theirs, ours).hex()
        _write_hello(connection, {"hexijax": PROTOCOL, "nonce": ours, "proof": proof})
        answer = _read_hello(connection, until)
        if "error" in answer:
            raise Refused(f"{address}: {answer['error']}")
        expected = derived(token, "launcher", theirs, ours).hex()
        if not hmac.compare_digest(expected, _word(answer, "proof")):
            raise Refused(
                f"Whoever listens at {address} does not know this run's token, so it "
                f"is not its launcher. Look at the address and at {TOKEN}."
            )
    except Closed as error:
        connection.close()
        raise Refused(
            f"Whoever listens at {address} is no rendezvous of hexijax ({error}). Look "
            "at the address that the launcher says."
        ) from error
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    keys = [derived(token, f"to {who}", theirs, ours) for who in ("launcher", "island")]
    return Line(connection, *keys)


def answer(connection: socket.socket, token: str, seconds: float) -> Line:
    """The other side of ``call``; the caller closes ``connection`` if it fails.

    Raises:
      Closed: whoever calls does not know the token, or is no island.
      OSError: it broke off, or took too long.
    """
    until = time.monotonic() + seconds
    connection.settimeout(seconds)
    _plain(connection)
    ours = secrets.token_hex(16)
    _write_hello(connection, {"hexijax": PROTOCOL, "nonce": ours})
    hello = _read_hello(connection, until)
    if hello.get("hexijax") != PROTOCOL:
        words = f"The launcher speaks protocol {PROTOCOL}: use one version of hexijax."
        _write_hello(connection, {"error": words})
        raise Closed("another protocol")
    theirs = _word(hello, "nonce")
    proof = derived(token, "island", ours, theirs).hex()
    if not hmac.compare_digest(proof, _word(hello, "proof")):
        words = (
            f"The launcher has another token. {TOKEN} must be that of the run; each "
            "run makes its own unless it is set for the launcher too."
        )
        _write_hello(connection, {"error": words})
        raise Closed("a wrong token")
    proof = derived(token, "launcher", ours, theirs).hex()
    _write_hello(connection, {"proof": proof})
    connection.settimeout(None)
    keys = [derived(token, f"to {who}", ours, theirs) for who in ("island", "launcher")]
    return Line(connection, *keys)


def _tag(key: bytes, number: int, data: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + data, "sha256")


def _plain(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _write_hello(connection: socket.socket, message: Message) -> None:
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _read_hello(connection: socket.socket, until: float) -> Message:
    (size,) = _LENGTH.unpack(_read(connection, _LENGTH.size, until))
    if size > _HELLO_BYTES:  # before anybody has proved anything
        raise Closed("it says too much")
    try:
        message = json.loads(_read(connection, size, until))
    except (ValueError, RecursionError) as error:
        raise Closed("it speaks no JSON") from error
    if not isinstance(message, dict):
        raise Closed("it says no object")
    return message


def _word(hello: Message, name: str) -> str:
    """A nonce or a proof: plain, so that no stranger's word breaks what it is put
    into."""
    word = str(hello.get(name))
    if not (word.isascii() and word.isalnum()):
        raise Closed(f"its {name} is none")
    return word


def _read(connection: socket.socket, size: int, until: float | None = None) -> bytes:
    """``until``: by when all of it must be here, however slowly it drips."""
    parts: list[bytes] = []
    while size:
        if until is not None:
            if (left := until - time.monotonic()) <= 0:
                raise Closed("it says too little")
            connection.settimeout(left)
        try:
            part = connection.recv(min(size, 2**20))
        except TimeoutError as error:
            raise Closed("it says nothing") from error
        except OSError as error:
            raise Closed(str(error)) from error
        if not part:
            raise Closed("it hung up")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def shut(connection: socket.socket) -> None:
    """Closes a socket; whoever waits at it, to read or to accept, is woken."""
    with contextlib.suppress(OSError):  # it has gone already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
