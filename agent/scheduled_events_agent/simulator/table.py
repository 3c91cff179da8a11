"""A simulated Table Storage with one table, in memory: what the agents of a fleet ask of it, and no more."""

import re
import threading
from itertools import count
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from scheduled_events_agent.simulator.protocol import Answer, Request, make_answer
from scheduled_events_agent.simulator.server import LOOPBACK, Server

_NAME = "the table"
_ENTITY = re.compile(r"\(PartitionKey='(.*)',RowKey='(.*)'\)$")
_FILTER = re.compile(r"PartitionKey eq '([^']*)'(?: and RowKey ge '([^']*)' and RowKey lt '([^']*)')?$")

Entity = dict[str, Any]


class SimulatedTable:
    """Listens while it is entered. Takes any signature."""

    SAS = "sv=2019-02-02&sig=simulated"

    def __init__(self, port: int = 0, *, bind: str = LOOPBACK) -> None:
        """``port`` 0: a free one. Raises SimulatorError."""
        self._entities: dict[tuple[str, str], Entity] = {}
        self._versions = count(1)
        self._lock = threading.Lock()
        self._server = Server(
            (_NAME,), lambda _vm, _client, request: (self._answer(request), None), port, bind=bind
        )
        self.url = f"{self._server.url(_NAME)}/simulated/scheduledevents"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def list_entities(self, partition: str, first: str = "", after: str = "") -> list[Entity]:
        """The partition's entities, from the key ``first`` to before ``after``, if given."""
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

    def _answer(self, request: Request) -> Answer:
        target = urlsplit(request.target)
        try:
            entity = msgspec.json.decode(request.body, type=Entity) if request.body else None
            match request.method:
                case "GET" if found := _FILTER.match(parse_qs(target.query)["$filter"][0]):
                    return make_answer(200, msgspec.json.encode({"value": self.list_entities(*found.groups(""))}))
                case "POST" if entity:
                    status, code = self.write(entity["PartitionKey"], entity["RowKey"], entity, "")
                case "PUT" | "DELETE" if found := _ENTITY.search(unquote(target.path)):
                    status, code = self.write(found[1], found[2], entity, request.headers.get("if-match"))
                case _:
                    status = 400
                    code = "InvalidInput"
        except (msgspec.DecodeError, KeyError):
            status = 400
            code = "InvalidInput"
        error = {"odata.error": {"code": code, "message": {"value": code}}}
        return make_answer(status, msgspec.json.encode(error) if code else b"")
