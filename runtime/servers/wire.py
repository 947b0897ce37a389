"""Calls from workers to servers: one connection each way of asking, a deadline for every call.

A call is a name and arguments; its answer a value, or an error that is raised again where it was called. Connections are
Python's own (`multiprocessing.connection`): authenticated by a key that the run makes, framed, with arrays as they are.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

Address = tuple[str, int]


class ServerLost(ConnectionError):
    """A server that does not answer: dead, or not to be reached within the time that is allowed."""


class Peer:
    """One server, as a worker sees it. Calls of several threads take turns."""

    def __init__(self, address: Address, key: bytes, timeout_s: float) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._lock = threading.Lock()
        try:
            self._connection = Client(address)
            limited(self._connection, timeout_s, timeout_s)
            answer_challenge(self._connection, key)
            deliver_challenge(self._connection, key)
        except (OSError, EOFError) as error:
            raise ServerLost(f"no server at {address[0]}:{address[1]}: {_why(error)}") from None

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """The answer of the server. Raises ServerLost, and what the call raised there."""
        with self._lock:
            try:
                self._connection.send((name, arguments))
                return self._answer(timeout_s or self._timeout_s)
            except (OSError, EOFError) as error:
                self.close()
                raise ServerLost(f"server {self.address[0]}:{self.address[1]}: {_why(error)}") from None

    def _answer(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        done, value = self._connection.recv()
        if not done:
            late, told = value
            if late:
                raise TimeoutError(told)
            raise RuntimeError(f"server {self.address[0]}:{self.address[1]}: {told}")
        return value

    def close(self) -> None:
        """No further calls."""
        self._connection.close()


def _why(error: Exception) -> str:
    return "it has fallen silent" if isinstance(error, BlockingIOError) else str(error) or "gone"


def limited(connection: Connection, sending_s: float, receiving_s: float | None) -> None:
    """Small messages leave at once; one that nobody takes fails after `sending_s`, one that does not go on to come after `receiving_s`
    (None: never)."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(sending_s) + 1, 0))
        within = 0 if receiving_s is None else int(receiving_s) + 1
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", within, 0))


def answer_calls(
    connection: Connection, key: bytes, find: Callable[[str], Callable[..., Any]], timeout_s: float
) -> None:
    """Answer until the other end has gone, once it has shown within `timeout_s` that it knows the key; `find` gives the function of
    a name."""
    try:
        limited(connection, timeout_s, timeout_s)
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        limited(connection, timeout_s, None)
    except Exception:  # it does not know the key, or has gone while it said hello
        connection.close()
        return
    while True:
        try:
            name, arguments = connection.recv()
        except (OSError, EOFError):
            return
        try:
            reply = (True, find(name)(*arguments))
        except Exception as error:
            reply = (False, (isinstance(error, TimeoutError), f"{type(error).__name__}: {error}"))
        try:
            connection.send(reply)
        except OSError:
            return
