"""A simulated Table Storage with one table, in memory: what the agents of a fleet ask of it, and no more."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

_ENTITY = re.compile(r"\(PartitionKey='(.*)',RowKey='(.*)'\)$")
_FILTER = re.compile(r"PartitionKey eq '([^']*)'(?: and RowKey ge '([^']*)' and RowKey lt '([^']*)')?$")

Entity = dict[str, Any]


class SimulatedTable:
    """Listens on loopback while it is entered. Takes any signature."""

    SAS = "sv=2019-02-02&sig=simulated"

    def __init__(self) -> None:
        self._entities: dict[tuple[str, str], Entity] = {}
        self._versions = count(1)
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"table": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}/simulated/scheduledevents"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="table", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def list_entities(self, partition: str, first: str = "", after: str = "") -> list[Entity]:
        """Those with keys from ``first`` to before ``after``, if given."""
        with self._lock:
            found = [(key, one) for (name, key), one in sorted(self._entities.items()) if name == partition]
        return [one for key, one in found if first <= key and (not after or key < after)]

    def write(self, partition: str, key: str, entity: Entity | None, version: str | None) -> tuple[int, str]:
        """HTTP status and error code. ``version``: None: whatever is there, "": nothing must be; "*": anything."""
        with self._lock:
            found = self._entities.get((partition, key))
            if version == "" and found:
                return 409, "EntityAlreadyExists"
            if version and not found:
                return 404, "ResourceNotFound"
            if version and found and version not in ("*", found["odata.etag"]):
                return 412, "UpdateConditionNotSatisfied"
            if entity is None:
                del self._entities[partition, key]
            else:
                etag = f'W/"{next(self._versions)}"'
                fields = {"odata.etag": etag, "PartitionKey": partition, "RowKey": key}
                self._entities[partition, key] = {**entity, **fields}
            return 204, ""


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # a fleet may connect all at once


class _Handler(BaseHTTPRequestHandler):
    table: SimulatedTable
    timeout = 30

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        match = _FILTER.match(query.get("$filter", [""])[0])
        self._answer(200, {"value": self.table.list_entities(*match.groups("")) if match else []})

    def do_POST(self) -> None:
        entity = self._read()
        self._tell(*self.table.write(entity["PartitionKey"], entity["RowKey"], entity, ""))

    def do_PUT(self) -> None:
        self._write(self._read())

    def do_DELETE(self) -> None:
        self._write(None)

    def _write(self, entity: Entity | None) -> None:
        match = _ENTITY.search(unquote(urlsplit(self.path).path))
        if match is None:
            self._tell(400, "InvalidUri")
        else:
            self._tell(*self.table.write(match[1], match[2], entity, self.headers["If-Match"]))

    def _read(self) -> Entity:
        entity: Entity = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return entity

    def _tell(self, status: int, code: str) -> None:
        self._answer(status, {"odata.error": {"code": code, "message": {"value": code}}} if code else None)

    def _answer(self, status: int, content: object) -> None:
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in http.server
        """It would fill the terminal."""
