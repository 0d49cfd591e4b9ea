"""Send messages over a stream socket: frames of one kind byte, a length and a body, with file descriptors beside them."""

from __future__ import annotations

import os
import socket
import struct
import threading

_HEAD = struct.Struct(">cQ")
_FDS_AT_ONCE = 200  # the kernel takes 253 in one message
_BUFFER = 1 << 20

EVENT = b"e"  # JSON of an event
RESULT = b"r"  # pickle of how a host's entry ended
JOB = b"j"  # what the supervisor asks of a host whose entry receives
ANSWER = b"a"  # pickle of an event, which then need not be JSON
LEAVE = b"l"  # all hosts are over
CONTROL = b"c"  # pickle of a message between the supervisor, the pre-loaded parent and a keeper


class Inbox:
    """Collect what arrives on a socket and cut it into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self.is_closed = False

    def receive(self, sock: socket.socket) -> list[tuple[bytes, bytes]]:
        """Take what is there without waiting; the frames that are complete now."""
        while not self.is_closed:
            try:
                arrived = sock.recv(_BUFFER, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:  # reset: the other end was killed with bytes unread
                arrived = b""
            self.is_closed = not arrived
            self._bytes += arrived
        frames, at = [], 0
        while len(self._bytes) - at >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._bytes, at)
            end = at + _HEAD.size + length
            if len(self._bytes) < end:
                break
            frames.append((kind, bytes(self._bytes[at + _HEAD.size : end])))
            at = end
        del self._bytes[:at]
        return frames


class Channel:
    """Hold one end of a connection that several threads write and one thread reads, blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._lock = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return two connected ends, with buffers for bursts of events."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        return cls(ends[0]), cls(ends[1])

    def send(self, kind: bytes, body: bytes) -> None:
        """Send one frame; OSError when the other end is gone."""
        with self._lock:  # and in one piece, because a process that a program forks has the socket, but a lock of its own
            self.socket.sendall(_HEAD.pack(kind, len(body)) + body)

    def send_fds(self, fds: list[int]) -> None:
        """Send file descriptors, as many as the other end expects in `receive_fds`."""
        with self._lock:
            for at in range(0, len(fds), _FDS_AT_ONCE):
                socket.send_fds(self.socket, [b"f"], fds[at : at + _FDS_AT_ONCE])

    def receive_fds(self, count: int) -> list[int]:
        """Wait for that many file descriptors."""
        fds: list[int] = []
        while len(fds) < count:
            _, arrived, _, _ = socket.recv_fds(self.socket, 1, _FDS_AT_ONCE)
            if not arrived:
                raise EOFError
            fds += arrived
        for fd in fds:
            os.set_inheritable(fd, False)
        return fds

    def receive(self) -> tuple[bytes, bytes]:
        """Wait for one frame; EOFError when the other end is gone."""
        kind, length = _HEAD.unpack(self._exactly(_HEAD.size))
        return kind, self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            arrived = self.socket.recv(min(count - len(parts), _BUFFER))
            if not arrived:
                raise EOFError
            parts += arrived
        return bytes(parts)

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self.socket.fileno()

    def close(self) -> None:
        """Close this end."""
        self.socket.close()
