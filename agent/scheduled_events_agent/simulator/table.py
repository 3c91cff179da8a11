"""A simulated Table Storage with one table, in memory. It supports only the requests of a fleet's agents."""

import re
import threading
from datetime import UTC, datetime
from ipaddress import ip_address
from itertools import count
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from scheduled_events_agent.simulator.protocol import Answer, Request, make_answer
from scheduled_events_agent.simulator.server import LOOPBACK, Server

_NAME = "the table"
_ENTITY = re.compile(r"\(PartitionKey='(.*)',RowKey='(.*)'\)$")
_FILTER = re.compile(r"PartitionKey eq '([^']*)'$")
_MAX_PAGE = 1000

Entity = dict[str, str]


class SimulatedTable:
    """A context manager that listens while it is entered. It accepts any signature."""

    SAS = "sv=2019-02-02&sig=simulated"

    def __init__(self, port: int = 0, *, bind: str = LOOPBACK) -> None:
        """``port`` 0: a free one. Raises SimulatorError.

        ``bind``: an address of this machine. Unless it stands for all of them, the table listens on loopback:
        agents use a table without TLS there only.
        """
        bind = bind if ip_address(bind).is_unspecified else LOOPBACK
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

    def list_entities(self, partition: str) -> list[Entity]:
        """The partition's entities in the order of their keys."""
        with self._lock:
            return [entity for (name, _), entity in sorted(self._entities.items()) if name == partition]

    def _answer(self, request: Request) -> Answer:
        target = urlsplit(request.target)
        etag = request.headers.get("if-match", "")
        try:
            entity = msgspec.json.decode(request.body, type=Entity) if request.body else None
            match request.method:
                case "GET":
                    return self._page(parse_qs(target.query))
                case "POST" if entity:
                    return self._write(entity["PartitionKey"], entity["RowKey"], entity, "")
                case "PUT" | "DELETE" if etag and (found := _ENTITY.search(unquote(target.path))):
                    return self._write(found[1], found[2], entity, etag)
        except (msgspec.DecodeError, KeyError, ValueError):
            pass
        return _error(400, "InvalidInput")

    def _page(self, query: dict[str, list[str]]) -> Answer:
        """At most as many entities as are asked for, and where the next page begins."""
        found = _FILTER.match(query["$filter"][0])
        if found is None:
            return _error(400, "InvalidInput")
        first = query.get("NextRowKey", [""])[0]
        size = min(int(query.get("$top", [str(_MAX_PAGE)])[0]), _MAX_PAGE)
        entities = [entity for entity in self.list_entities(found[1]) if entity["RowKey"] >= first]
        headers: tuple[tuple[str, str], ...] = ()
        if len(entities) > size:
            names = ("PartitionKey", "RowKey")
            headers = tuple([(f"x-ms-continuation-Next{name}", entities[size][name]) for name in names])
        return make_answer(200, msgspec.json.encode({"value": entities[:size]}), headers=headers)

    def _write(self, partition: str, key: str, entity: Entity | None, etag: str) -> Answer:
        """Write it, or delete it if it is None. ``etag`` "": there must be none yet; ``*``: whatever is there."""
        with self._lock:
            found = self._entities.get((partition, key))
            if not etag and found:
                return _error(409, "EntityAlreadyExists")
            if etag and not found:
                return _error(404, "ResourceNotFound")
            if found and etag not in ("*", found["odata.etag"]):
                return _error(412, "UpdateConditionNotSatisfied")
            if entity is None:
                del self._entities[partition, key]
                return make_answer(204)
            own = {"PartitionKey": partition, "RowKey": key, "odata.etag": f'W/"{next(self._versions)}"'}
            written = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
            self._entities[partition, key] = {**entity, **own, "Timestamp": written}
            return make_answer(204, headers=(("ETag", own["odata.etag"]),))


def _error(status: int, code: str) -> Answer:
    error = {"odata.error": {"code": code, "message": {"value": code}}}
    return make_answer(status, msgspec.json.encode(error))
