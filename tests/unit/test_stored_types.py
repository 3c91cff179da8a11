"""Types of which stored values are made: none of them ignores a field that it does not know."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect

import scheduled_events_agent
from scheduled_events_agent.hooks.durations import HookTimes
from scheduled_events_agent.notifications import Notification
from scheduled_events_agent.store import Loss
from scheduled_events_agent.workflow import Workflow


def types_read_back() -> Iterator[Any]:
    """All types as which the agent reads JSON and rows; what it writes is read as one of them.

    Commands, simulator and the cluster's client read what is not stored.
    """
    package = Path(scheduled_events_agent.__file__).parent
    for path in package.rglob("*.py"):
        place = path.relative_to(package)
        if place.parts[0] in ("cli", "kubernetes", "simulator"):
            continue
        names = [one for one in place.with_suffix("").parts if one != "__init__"]
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match call:
                case ast.Call(func=ast.Attribute(attr="decode"), keywords=[ast.keyword(arg="type", value=type_)]):
                    pass
                case ast.Call(func=ast.Attribute(attr="convert"), args=[_, type_]):
                    pass
                case ast.Call(func=ast.Attribute(attr="Decoder"), args=[type_]):
                    pass
                case _:
                    continue
            module = importlib.import_module(".".join([package.name, *names]))
            yield eval(ast.unparse(type_), vars(module))


def structs_in(found: Any) -> Iterator[type[msgspec.Struct]]:
    """The Structs that this type is made of."""
    if isinstance(found, msgspec.inspect.StructType):
        yield found.cls
    for name in found.__struct_fields__:
        inner = getattr(found, name)
        for one in inner if isinstance(inner, tuple) else (inner,):
            if isinstance(one, msgspec.inspect.Type | msgspec.inspect.Field):
                yield from structs_in(one)


def test_all_that_is_stored_forbids_unknown_fields() -> None:
    found = {struct for type_ in types_read_back() for struct in structs_in(msgspec.inspect.type_info(type_))}
    assert found > {Workflow, Notification, HookTimes, Loss}
    assert [struct for struct in found if not struct.__struct_config__.forbid_unknown_fields] == []
