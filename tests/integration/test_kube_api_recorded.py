"""The stand-in of a Kubernetes API server answers as a real one did, request by request."""

import json
import re
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from kube_api import KubeApi

RECORDED = Path(__file__).parents[1] / "kube_api/recorded"
SEQUENCES = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDED.glob("*.json"))}
UID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
GENERATED = re.compile(r"\bvm-1\.[a-z0-9]{5}\b")
TIMES = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")

# By the name of a record: what is not compared, and why.
WHOLE_ANSWER = {
    "continue that is too old": "its token was made up, and the real one had not dropped that version yet; the"
    " stand-in answers 410, as the API's documentation says",
}
CAUSES = {
    "422 taint effect": "the real one checks a node twice and tells it twice; causes of a 422 are read by no code",
    "422 label": "the real one checks a node twice and tells it twice each time; as above",
}
# From this record on, deletionGracePeriodSeconds of its pod: ten of its seconds had passed on the real server.
GRACE_FROM, GRACE_OF = "eviction allowed", "w0"


class Client:
    """Sends the recorded requests, with what this server has given out where the real one had its own."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._trusted = ssl.create_default_context(cafile=str(api.authority.ca))
        certified = ssl.create_default_context(cafile=str(api.authority.ca))
        subject = "/O=system:nodes/CN=system:node:vm-1"
        certified.load_cert_chain(*api.authority.issue("kubelet", subject, "extendedKeyUsage=clientAuth"))
        self._contexts = {"kubelet of vm-1": certified}
        self._tokens = {"admin": api.admin_token, "a wrong token": "abc"}
        self._texts: dict[str, str] = {}
        """What stands in the recording: what stands here for it."""

    def send(self, record: Mapping[str, Any]) -> tuple[int, Mapping[str, str], Any]:
        asked = record["request"]
        sender = record["as"]
        headers = {
            "Content-Type": asked.get("content_type", ""),
            "Accept": asked.get("accept", "application/json"),
        }
        if sender in self._tokens:
            headers["Authorization"] = f"Bearer {self._tokens[sender]}"
        request = urllib.request.Request(
            self._api.url + self._translated(asked["path"]),
            data=self._body(asked).encode() if "body" in asked else None,
            headers={name: value for name, value in headers.items() if value},
            method=asked["method"],
        )
        context = self._contexts.get(sender, self._trusted)
        https = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        try:
            with https.open(request, timeout=60) as answer:
                return self._learned(record, answer.status, dict(answer.headers), json.load(answer))
        except urllib.error.HTTPError as error:
            with error:
                return self._learned(record, error.code, dict(error.headers), json.load(error))

    def _body(self, asked: Mapping[str, Any]) -> str:
        body = asked["body"]
        if body == "(an annotation of 262,145 bytes)":
            body = {"metadata": {"name": "big", "annotations": {"row": "x" * 262_145}}}
        elif isinstance(body, str):
            return body  # it is not JSON
        return self._translated(json.dumps(body))

    def _translated(self, text: str) -> str:
        """The text with this server's uids, versions and continue tokens."""
        for theirs, ours in self._texts.items():
            text = text.replace(theirs, ours)
        return text

    def _learned(
        self, record: Mapping[str, Any], status: int, headers: Mapping[str, str], body: Any
    ) -> tuple[int, Mapping[str, str], Any]:
        theirs = record["answer"]["body"].get("metadata", {})
        ours = body.get("metadata", {})
        for key in ("uid", "continue"):
            if key in theirs and key in ours:
                self._texts.setdefault(theirs[key], ours[key])
        if record["request"]["method"] != "GET" and "resourceVersion" in ours:
            version = f'"resourceVersion": "{theirs["resourceVersion"]}"'
            self._texts[version] = f'"resourceVersion": "{ours["resourceVersion"]}"'
        if body.get("kind") == "TokenRequest":
            self._tokens["the agent's service account, in a pod of vm-1"] = body["status"]["token"]
        return status, headers, body


class Plain:
    """What is to be compared of an answer, with a number for each uid, version, time or generated name."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._has_grace_passed = False

    def of(self, record: Mapping[str, Any], status: int, headers: Mapping[str, str], body: Any) -> Any:
        self._has_grace_passed |= record["name"] == GRACE_FROM
        if record["name"] in WHOLE_ANSWER:
            return None
        type_ = (headers.get("Content-Type") or headers.get("content-type") or "").partition(";")[0]
        told = [status, type_, headers.get("Retry-After"), body["kind"]]
        if body["kind"] == "Status":
            told.append(self._status(record, body))
        elif "items" in body:
            told += [self._object(item) for item in body["items"]]
            told.append("continue" in body["metadata"])
        else:
            told.append(self._object(body))
        return json.loads(self._numbered(json.dumps(told)))

    def _status(self, record: Mapping[str, Any], body: Mapping[str, Any]) -> Any:
        if body["status"] != "Failure":
            return body["status"]
        details = dict(body.get("details", {}))
        if record["name"] in CAUSES:
            del details["causes"]
        return [body["message"], body.get("reason"), body["code"], details]

    def _object(self, item: Mapping[str, Any]) -> Any:
        metadata = item.get("metadata", {})
        keys = ("name", "namespace", "uid", "generation", "labels", "annotations", "ownerReferences")
        told = [metadata.get(key) for key in keys]
        told.append("deletionTimestamp" in metadata)
        if not (self._has_grace_passed and metadata.get("name") == GRACE_OF):
            told.append(metadata.get("deletionGracePeriodSeconds"))
        told += [item.get("spec"), item.get("rules"), item.get("status", {}).get("conditions")]
        return [*told, item.get("status", {}).get("phase")]

    def _numbered(self, text: str) -> str:
        for pattern in (UID, GENERATED):
            text = pattern.sub(lambda match: f"#{self._numbers.setdefault(match[0], len(self._numbers))}", text)
        text = re.sub(r"record \((\d+)\)", "record (...)", text)  # a resourceVersion
        return TIMES.sub("a time", text)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubeApi]:
    with KubeApi(tmp_path, has_controllers=False) as started:
        yield started


@pytest.mark.parametrize("name", SEQUENCES)
def test_each_recorded_request_gets_the_recorded_answer(name: str, api: KubeApi) -> None:
    client = Client(api)
    theirs, ours = Plain(), Plain()
    for number, record in enumerate(SEQUENCES[name]):
        status, headers, body = client.send(record)
        answer = record["answer"]
        expected = theirs.of(record, answer["status"], answer["headers"], answer["body"])
        got = ours.of(record, status, headers, body)
        assert got == expected, f"{number}: {record['name']}"


def test_what_is_left_out_is_there_to_be_left_out() -> None:
    names = {record["name"] for records in SEQUENCES.values() for record in records}
    assert {*WHOLE_ANSWER, *CAUSES, GRACE_FROM} <= names
    assert sum(map(len, SEQUENCES.values())) == 116
