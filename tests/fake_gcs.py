"""As much of Google Cloud Storage's JSON API as gcsfs, tensorstore and google-cloud-storage use, on loopback.

Objects are in memory, appear whole and at once, carry generations, and know no folders, as in a bucket. By script,
requests fail, hang or tell old news.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import email
import itertools
import json
import os
import re
import socket
import struct
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator, MutableMapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)(?:/rewriteTo/b/([^/]+)/o/([^/]+))?")


@dataclasses.dataclass
class Fault:
    """What happens to the next `times` requests whose method and path match: an HTTP status, or a kind by name.

    "reset" closes the connection without an answer, "slow" answers after `seconds`, and "lag" lists only what was there
    when the fault was scripted.
    """

    kind: int | str
    times: float = float("inf")
    methods: str = "GET POST PUT DELETE"
    path: str = ""
    seconds: float = 0.05
    seen: int = 0

    def hits(self, method: str, path: str) -> bool:
        """Whether the fault meets this request; counts it then."""
        if self.seen >= self.times or method not in self.methods.split() or self.path not in path:
            return False
        if self.kind == "lag" and not path.partition("?")[0].rstrip("/").endswith("/o"):
            return False
        self.seen += 1
        return True


MESSAGES = {401: "Invalid Credentials", 403: "no access", 412: "another generation", 429: "slow down"}


class FakeGcs:
    """`with FakeGcs("bucket") as gcs:` serves one bucket; `objects` is {name: bytes}, `environment` finds it."""

    def __init__(self, bucket: str):
        self.bucket, self.objects, self.generations, self.uploads = bucket, {}, {}, {}
        self.faults, self._listed = [], None
        self.lock, self.numbers = threading.RLock(), itertools.count(1)
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"gcs": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = environment(self.url)

    def __enter__(self) -> FakeGcs:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def script(self, kind: int | str, **how: object) -> Fault:
        """Adds a fault; `gcs.faults.clear()` ends all of them."""
        with self.lock:
            self.faults.append(fault := Fault(kind, **how))
            if kind == "lag":
                self._listed = set(self.objects)
        return fault

    def fault_of(self, method: str, path: str) -> Fault | None:
        with self.lock:
            return next((fault for fault in self.faults if fault.hits(method, urllib.parse.unquote(path))), None)

    def put(self, name: str, content: bytes) -> dict:
        with self.lock:
            self.objects[name], self.generations[name] = content, next(self.numbers)
            return self.resource(name)

    def resource(self, name: str) -> dict:
        content, generation = self.objects[name], str(self.generations[name])
        crc = base64.b64encode(zlib.crc32(content).to_bytes(4)).decode()
        return {
            "kind": "storage#object",
            **{"id": f"{self.bucket}/{name}/{generation}", "name": name, "bucket": self.bucket},
            **{"generation": generation, "metageneration": "1", "size": str(len(content)), "etag": crc},
            **{"updated": "2026-01-01T00:00:00.000Z", "timeCreated": "2026-01-01T00:00:00.000Z"},
        }

    def listing(self, query: dict[str, str], lagging: bool = False) -> dict:
        prefix, delimiter, page = query.get("prefix", ""), query.get("delimiter"), int(query.get("maxResults", 1000))
        items, prefixes = [], []
        with self.lock:
            names = sorted(n for n in self.objects if n.startswith(prefix) and n > query.get("pageToken", ""))
            if lagging:
                names = [n for n in names if n in self._listed]
            names = [n for n in names if query.get("startOffset", "") <= n < query.get("endOffset", "\U0010ffff")]
            for name in names[:page]:
                head, cut, _ = name[len(prefix) :].partition(delimiter or "\0")
                if not cut:
                    items.append(self.resource(name))
                elif prefix + head + delimiter not in prefixes:
                    prefixes.append(prefix + head + delimiter)
        more = {"nextPageToken": names[page - 1]} if len(names) > page else {}
        return {"kind": "storage#objects", "items": items, "prefixes": prefixes, **more}


def environment(url: str) -> dict[str, str]:
    """The variables by which the libraries take the server at `url` for Google's."""
    return {
        "STORAGE_EMULATOR_HOST": url,  # gcsfs and google-cloud-storage
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "nobody",  # tensorstore asks no metadata server
        "GOOGLE_CLOUD_PROJECT": "nowhere",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks for the kind of bucket by gRPC
    }


class OtherGcs(MutableMapping):
    """An emulator that somebody else wrote, at `url`, with one bucket that starts empty; used as `FakeGcs`, without
    faults. `objects` is this mapping of names to bytes."""

    def __init__(self, url: str, bucket: str):
        self._bucket, self.objects, self.environment = f"{url}/storage/v1/b/{bucket}", self, environment(url)
        with contextlib.suppress(urllib.error.HTTPError):  # it is there
            self._ask("POST", f"{url}/storage/v1/b?project=nowhere", {"name": bucket})

    def __enter__(self) -> OtherGcs:
        self.clear()
        return self

    def __exit__(self, *exception: object) -> None:
        self.clear()

    @property
    def generations(self) -> dict[str, str]:
        return {item["name"]: item["generation"] for item in self._listing()}

    def put(self, name: str, content: bytes) -> None:
        path = self._bucket.replace("/storage/", "/upload/storage/")
        self._ask("POST", f"{path}/o?uploadType=media&name={urllib.parse.quote(name, safe='')}", content)

    __setitem__ = put

    def __getitem__(self, name: str) -> bytes:
        return self._ask("GET", self._object(name) + "?alt=media")

    def __delitem__(self, name: str) -> None:
        self._ask("DELETE", self._object(name))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(item["name"] for item in self._listing()))

    def __len__(self) -> int:
        return len(self._listing())

    def _object(self, name: str) -> str:
        return f"{self._bucket}/o/{urllib.parse.quote(name, safe='')}"

    def _listing(self) -> list[dict]:
        found, token = [], ""
        while True:
            page = json.loads(self._ask("GET", f"{self._bucket}/o?maxResults=1000&pageToken={token}"))
            found += page.get("items", [])
            if not (token := page.get("nextPageToken", "")):
                return found

    def _ask(self, method: str, url: str, body: bytes | dict | None = None) -> bytes:
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = {"Content-Type": "application/json" if isinstance(body, dict) else "application/octet-stream"}
        with urllib.request.urlopen(urllib.request.Request(url, content, headers, method=method)) as answer:
            return answer.read()


def bucket_of(name: str) -> FakeGcs | OtherGcs:
    """A bucket: at the address in RPG_JAX_GCS, as of Google's storage-testbench, or one of this file's."""
    url = os.environ.get("RPG_JAX_GCS")
    return OtherGcs(url, name) if url else FakeGcs(name)


class _Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 64

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # clients hang up on what they no longer wait for
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms until the client has acknowledged the headers
    gcs: FakeGcs
    lagging = False

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self._scripted(self._get)

    def do_POST(self) -> None:
        self._scripted(self._post)

    def do_PUT(self) -> None:
        self._scripted(lambda body: self._chunk(self._asked()[1], body))

    def do_DELETE(self) -> None:
        self._scripted(self._delete)

    def _scripted(self, answer: Callable[[bytes], None]) -> None:
        """Answers a request as its fault says, or as a bucket without faults does."""
        body, fault = self._body(), self.gcs.fault_of(self.command, self.path)
        kind = fault.kind if fault else None
        self.lagging = kind == "lag"
        if isinstance(kind, int):
            return self._error(kind, MESSAGES.get(kind, "scripted"))
        if kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return None
        if fault and kind == "slow":
            time.sleep(fault.seconds)
        return answer(body)

    def _get(self, body: bytes) -> None:
        path, query = self._asked()
        if path == f"/storage/v1/b/{self.gcs.bucket}":
            return self._json({"kind": "storage#bucket", "name": self.gcs.bucket, "location": "US"})
        if path.rstrip("/") == f"/storage/v1/b/{self.gcs.bucket}/o":
            return self._json(self.gcs.listing(query, self.lagging))
        name = self._object(path)
        with self.gcs.lock:
            if name not in self.gcs.objects:
                return self._error(404, f"no such object: {name}")
            content, generation = self.gcs.objects[name], str(self.gcs.generations[name])
            resource = self.gcs.resource(name)
        if query.get("ifGenerationNotMatch") == generation:
            return self._reply(304, b"")
        if query.get("alt") != "media":
            return self._json(resource)
        headers = {"x-goog-generation": generation, "etag": generation}
        if match := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            begin, end = int(match[1] or 0), min(int(match[2] or len(content) - 1) + 1, len(content))
            if begin >= len(content):
                return self._error(416, "beyond the end")
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            return self._reply(206, content[begin:end], headers)
        return self._reply(200, content, headers)

    def _post(self, body: bytes) -> None:
        path, query = self._asked()
        if match := _OBJECT.fullmatch(path):
            source, target = (urllib.parse.unquote(part) for part in (match[2], match[4]))
            with self.gcs.lock:
                if source not in self.gcs.objects:
                    return self._error(404, f"no such object: {source}")
                resource = self.gcs.put(target, self.gcs.objects[source])
            return self._json({"kind": "storage#rewriteResponse", "done": True, "resource": resource})
        if "upload_id" in query:
            return self._chunk(query, body)
        kind, name = query["uploadType"], query.get("name")
        if kind == "multipart":
            message = email.message_from_bytes(
                b"Content-Type: " + self.headers["Content-Type"].encode() + b"\n\n" + body
            )
            described, content = (part.get_payload(decode=True) for part in message.get_payload())
            return self._store(json.loads(described).get("name", name), content, query)
        if kind == "resumable":
            name = name or json.loads(body)["name"]
            upload = str(next(self.gcs.numbers))
            self.gcs.uploads[upload] = (name, b"")
            location = f"{self.gcs.url}{path}?uploadType=resumable&upload_id={upload}"
            return self._reply(200, b"", {"Location": location})
        return self._store(name, body, query)

    def _chunk(self, query: dict[str, str], body: bytes) -> None:
        name, before = self.gcs.uploads[query["upload_id"]]
        content, chunk = before + body, self.headers.get("Content-Range", "")
        self.gcs.uploads[query["upload_id"]] = name, content
        if chunk.endswith("/*"):
            return self._reply(308, b"", {"Range": f"bytes=0-{len(content) - 1}"})
        return self._store(name, content, query)

    def _delete(self, body: bytes) -> None:
        path, query = self._asked()
        name = self._object(path)
        with self.gcs.lock:
            if name not in self.gcs.objects:
                return self._error(404, "no such object")
            if query.get("ifGenerationMatch", str(self.gcs.generations[name])) != str(self.gcs.generations[name]):
                return self._error(412, "another generation")
            del self.gcs.objects[name]
        return self._reply(204, b"")

    def _store(self, name: str, content: bytes, query: dict[str, str]) -> None:
        with self.gcs.lock:
            present = str(self.gcs.generations[name]) if name in self.gcs.objects else "0"
            if query.get("ifGenerationMatch", present) != present:
                return self._error(412, "another generation")
            return self._json(self.gcs.put(name, content))

    def _asked(self) -> tuple[str, dict[str, str]]:
        url = urllib.parse.urlsplit(self.path)
        return url.path, dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))

    def _object(self, path: str) -> str | None:
        match = _OBJECT.fullmatch(path)
        return urllib.parse.unquote(match[2]) if match else None

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _json(self, value: dict) -> None:
        self._reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, code: int, message: str) -> None:
        content = json.dumps({"error": {"code": code, "message": message}}).encode()
        self._reply(code, content, {"Content-Type": "application/json"})

    def _reply(self, code: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
