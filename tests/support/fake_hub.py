"""A Hugging Face hub on this machine: as much of its API as an upload of a model needs."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "Secret0" * 5


class FakeHub:
    """What it was asked for, and what it holds."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.requests: list[str] = []
        self.tokens: set[str] = set()
        self.created: list[dict[str, Any]] = []
        self.is_private: bool | None = None
        """None: there is no repository yet."""
        self.files: dict[str, bytes] = {}
        self.refuses = ""
        """The end of the path of requests that it answers with 403."""

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and JSON of the answer to a request."""
        if self.refuses and path.endswith(self.refuses):
            return 403, {"error": "no"}
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            url = f"{self.endpoint}/me/short"
            if self.is_private is not None:
                return 409, {"error": "You already created this model repo", "url": url}
            self.is_private = self.created[-1].get("visibility") == "private"
            return 200, {"url": url}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            named = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in named]
            return 200, {"files": files}
        if path.endswith("/commit/main"):
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    file = entry["value"]
                    self.files[file["path"]] = base64.b64decode(file["content"])
            oid = "0" * 40
            return 200, {"commitUrl": f"{self.endpoint}/me/short/commit/{oid}", "commitOid": oid}
        return 200, {"id": "me/short", "private": self.is_private, "sha": "0" * 40}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve a hub without any repository on loopback."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            hub.tokens.add(self.headers.get("authorization", ""))
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, answer = hub.answer(path, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def asks(hub: FakeHub) -> str:
    """Python that lets a process ask this hub with `TOKEN`, whatever it has imported."""
    return (
        "import os\n"
        "import huggingface_hub.constants as constants\n"
        f"os.environ['HF_TOKEN'] = {TOKEN!r}\n"
        "os.environ['HF_HUB_OFFLINE'] = '0'\n"
        "constants.HF_HUB_OFFLINE = False\n"
        f"constants.ENDPOINT = {hub.endpoint!r}\n"
    )
