"""A TCP proxy before a server, with the faults of a network: one fault, or none, for each connection."""

from __future__ import annotations

import socket
import struct
import threading
import time

STATUSES = (429, 500, 503)
FAULTS = ("drop", "lose", "delay", "half-close", *STATUSES)


class Proxy:
    """Passes each connection's one request on, and its answer back.

    Args:
      port: of the server.
      faults: gives each connection one of `FAULTS`, or None, without end. "drop" resets the
        connection before the server has the request; "lose" closes it after the server has answered; "delay" holds the
        request for `seconds`; "half-close" ends the stream in the middle of the answer; a status is answered at once.
    """

    def __init__(self, port, faults, seconds=0.1):
        self._port, self._faults, self._seconds, self.met = port, faults, seconds, []
        self._lock = threading.Lock()  # a generator takes one thread at a time
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def end(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with client:
            try:
                request = message(client)
                with self._lock:
                    self.met.append(fault := next(self._faults))
                if fault == "drop":  # a close without a linger resets
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                if fault in STATUSES:
                    client.sendall(f"HTTP/1.1 {fault} Fault\r\nContent-Length: 5\r\n\r\nfault".encode())
                    return
                time.sleep(self._seconds * (fault == "delay"))
                with socket.create_connection(("127.0.0.1", self._port)) as server:
                    server.sendall(request)
                    answer = message(server)
                if fault == "half-close":
                    client.sendall(answer[: len(answer) // 2])
                    client.shutdown(socket.SHUT_WR)
                    client.recv(1)  # until the other side closes too
                elif fault != "lose":
                    client.sendall(answer)
            except (OSError, EOFError):
                pass  # a side has gone


def message(stream):
    """The bytes of an HTTP message, whose length its head has. Raises EOFError if it is cut short."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += _more(stream)
    head, _, body = head.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    length = int(lengths[0].partition(b":")[2]) if lengths else 0
    while len(body) < length:
        body += _more(stream)
    return head + b"\r\n\r\n" + body


def _more(stream):
    if part := stream.recv(2**16):
        return part
    raise EOFError
