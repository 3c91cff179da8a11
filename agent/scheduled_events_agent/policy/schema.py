"""The JSON schema of the policy file, for editors; and settings as the file writes them."""

from datetime import time
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Meta

from scheduled_events_agent.policy.durations import format_duration
from scheduled_events_agent.policy.settings import KUBERNETES_FORMAT, Settings
from scheduled_events_agent.policy.typed_yaml import TIME, default_of, meta_kinds, unwrap_annotated


def policy_schema() -> dict[str, Any]:
    """The JSON schema of the policy file, for editors."""
    schema = json_schema(Settings)
    schema["$defs"]["Hook"]["oneOf"] = [{"required": ["run"]}, {"required": ["shell"]}]
    schema["$defs"]["FleetSettings"]["oneOf"] = [{"required": ["table"]}, {"required": ["leases"]}]
    is_of_cluster = {"properties": {"format": {"const": KUBERNETES_FORMAT}}, "required": ["format"]}
    schema["$defs"]["NotifyTarget"] |= {"if": is_of_cluster, "else": {"required": ["to"]}}
    return {"title": "Policy of scheduled-events-agent", **schema}


def json_schema(type_: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON schema of the text that ``parse`` accepts for a type. Defaults are as the YAML writes them."""
    definitions: dict[str, Any] = {}
    schema = _schema(type_, definitions)
    root = definitions.pop(schema["$ref"].rpartition("/")[2])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": definitions}


def plain(value: Any, annotation: Any) -> Any:
    """A value as the YAML writes it: durations and times as text, no keys that have their defaults."""
    type_, metas = unwrap_annotated(annotation)
    if value is None:
        return None
    if get_origin(type_) in (Union, UnionType):
        return plain(value, Annotated[get_args(type_)[0], Meta(), *metas])
    if isinstance(value, msgspec.Struct):
        return {
            item.encode_name: plain(getattr(value, item.name), item.type)
            for item in msgspec.structs.fields(value)
            if getattr(value, item.name) != default_of(item)
        }
    if isinstance(value, dict):
        return {key: plain(item, get_args(type_)[1]) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item, get_args(type_)[0]) for item in value]
    if isinstance(value, time):
        return value.isoformat("seconds" if value.second else "minutes")
    return format_duration(value) if "duration" in meta_kinds(metas) else value


def _schema(annotation: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    type_, metas = unwrap_annotated(annotation)
    if get_origin(type_) in (Union, UnionType):
        first, last = get_args(type_)
        other = {"type": "null"} if last is NoneType else _schema(last, definitions)
        union: dict[str, Any] = {"anyOf": [_schema(Annotated[first, Meta(), *metas], definitions), other]}
        description = union["anyOf"][0].pop("description", None)
        return union | ({"description": description} if description else {})
    schema = _bare_schema(type_, metas, definitions)
    if "one-or-many" in meta_kinds(metas):
        schema = {"anyOf": [schema["items"], schema]}
    for meta in metas:
        words: dict[str, Any] = {"description": meta.description, "pattern": meta.pattern}
        if schema.get("type") == "integer":
            words |= {"minimum": meta.ge, "maximum": meta.le}
        schema.update({word: value for word, value in words.items() if value is not None})
    return schema


def _bare_schema(type_: Any, metas: tuple[Meta, ...], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of the type itself, without its limits and its description."""
    origin = get_origin(type_)
    arguments = get_args(type_)
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        if type_.__name__ not in definitions:
            definitions[type_.__name__] = {}
            definitions[type_.__name__] = _struct_schema(type_, definitions)
        return {"$ref": f"#/$defs/{type_.__name__}"}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if origin is dict:
        schema = {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
        names = _schema(arguments[0], definitions)
        if names != {"type": "string"}:
            schema["propertyNames"] = names
        return schema
    if type_ is time:
        return {"type": "string", "pattern": f"^({TIME})$"}
    if type_ is float and "duration" in meta_kinds(metas):
        return {"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(d|h|m|s|ms))+$"}
    return {"type": {str: "string", bool: "boolean", int: "integer"}[type_]}


def _struct_schema(type_: type[msgspec.Struct], definitions: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    if type_.__doc__:
        schema["description"] = type_.__doc__.partition("\n")[0]
    for item in msgspec.structs.fields(type_):
        entry = _schema(item.type, definitions)
        default = default_of(item)
        if default is NODEFAULT:
            schema.setdefault("required", []).append(item.encode_name)
        elif not isinstance(default, msgspec.Struct) and default not in (None, "", (), {}):
            entry["default"] = plain(default, item.type)
        schema["properties"][item.encode_name] = entry
    return schema
