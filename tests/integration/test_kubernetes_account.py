"""Accounts for a cluster: kubeconfigs of all kinds, a pod's service account, and the name of the node."""

import base64
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube_access import Access, kubelet, service_account
from kube_certificates import Authority
from kube_objects import Store

from scheduled_events_agent.kubernetes.account import Account, AccountError, find_account, find_node

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def write(tmp_path: Path, authority: Authority) -> Write:
    """Writes a kubeconfig with these entries of its cluster and its user."""

    def write_file(cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None, **top: Any) -> Path:
        server = {"server": "https://10.0.0.1:6443", "certificate-authority": str(authority.ca)}
        content = {
            "clusters": [{"name": "c", "cluster": {**server, **(cluster or {})}}],
            "users": [{"name": "u", "user": {"token": "secret"} if user is None else user}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "any"}}],
            "current-context": "x",
            **top,
        }
        file = tmp_path / "kubeconfig"
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        return file

    return write_file


def load(file: Path) -> Account:
    return find_account(str(file), {})


def test_the_first_account_that_is_there_counts(tmp_path: Path, write: Write) -> None:
    named = write()
    (tmp_path / "credentials").mkdir()
    credential = tmp_path / "credentials" / "kubeconfig"
    shutil.copy(named, credential)
    environ = {
        "KUBECONFIG": str(named),
        "CREDENTIALS_DIRECTORY": str(credential.parent),
        "KUBERNETES_SERVICE_HOST": "fd00::1",
        "KUBERNETES_SERVICE_PORT": "443",
    }
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    (mounted / "token").write_text("of the pod\n")
    shutil.copy(
        yaml.safe_load(named.read_text())["clusters"][0]["cluster"]["certificate-authority"], mounted / "ca.crt"
    )
    assert find_account(str(credential), environ, mounted).origin == str(credential)
    assert find_account(None, environ, mounted).origin == str(named)
    del environ["KUBECONFIG"]
    assert find_account(None, environ, mounted).origin == str(credential)
    credential.unlink()
    account = find_account(None, environ, mounted)
    assert (account.server, account.read_token()) == ("https://[fd00::1]:443", "of the pod")
    del environ["KUBERNETES_SERVICE_HOST"]
    with pytest.raises(AccountError, match="there is no account for the cluster: give --kubeconfig FILE"):
        find_account(None, environ, mounted)


def test_files_are_relative_to_the_kubeconfig_and_read_each_time(tmp_path: Path, write: Write) -> None:
    file = write(user={"tokenFile": "here/token", "token": "not this one"})
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "token").write_text("first\n")
    account = load(file)
    assert account.read_token() == "first"
    (tmp_path / "here" / "token").write_text("second")
    assert account.read_token() == "second"


def test_a_kubeconfig_that_was_replaced_is_read_again(write: Write) -> None:
    account = load(write(user={"token": "old"}))
    assert account.current() is account
    write(user={"token": "new"})
    assert account.current().read_token() == "new"
    write(user={"exec": {"command": "x"}})
    with pytest.raises(AccountError, match="exec: no program is started"):
        account.current()


def test_certificates_may_be_in_the_kubeconfig_or_beside_it(write: Write, authority: Authority) -> None:
    pem, key = authority.issue("client", "/O=system:nodes/CN=system:node:vm-7", "extendedKeyUsage=clientAuth")

    def data(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    inside = {"client-certificate-data": data(pem), "client-key-data": data(key)}
    beside = {"client-certificate": str(pem), "client-key": str(key)}
    for user in (inside, beside):
        account = load(
            write({"certificate-authority": "", "certificate-authority-data": data(authority.ca)}, user)
        )
        context = account.ssl_context()
        assert account.ssl_context() is context
        assert [one["subject"] for one in context.get_ca_certs()] == [((("commonName", "kubernetes"),),)]
        assert find_node(account, None, {}, "HOST").name == "vm-7"


def test_a_certificate_that_was_replaced_is_loaded_anew(
    tmp_path: Path, write: Write, authority: Authority
) -> None:
    file = tmp_path / "current.pem"

    def replace(name: str) -> None:
        pem, key = authority.issue(name, f"/CN={name}", "extendedKeyUsage=clientAuth")
        file.write_bytes(pem.read_bytes() + key.read_bytes())

    replace("first")
    account = load(write(user={"client-certificate": str(file), "client-key": str(file)}))
    before = account.ssl_context()
    replace("second")
    assert account.ssl_context() is not before


@pytest.mark.parametrize(
    ("cluster", "user", "message"),
    [
        ({"server": "http://10.0.0.1"}, None, 'server: expected https://HOST:PORT; got "http://10.0.0.1"'),
        (
            {"server": "https://u:p@10.0.0.1"},
            None,
            'server: expected https://HOST:PORT; got "https://...@10.0.0.1"',
        ),
        ({"server": "https://10.0.0.1:0"}, None, "server: expected https://HOST:PORT"),
        ({"server": "https://10.0.0.1/?a=b"}, None, "server: expected https://HOST:PORT"),
        (
            {"insecure-skip-tls-verify": True},
            None,
            "insecure-skip-tls-verify: name the cluster's certificate-auth",
        ),
        ({"proxy-url": "http://proxy"}, None, "proxy-url: no proxy is used"),
        ({"certificate-authority": "/dev/null"}, None, "/dev/null: "),
        ({"certificate-authority": "/gone"}, None, "/gone: cannot be read: No such file"),
        ({"certificate-authority-data": "?"}, None, "a key that ends with -data is not base64"),
        ({"certificate-authority-data": "aGVsbG8="}, None, "certificate-authority: no certificates in PEM form"),
        (None, {"exec": {"command": "kubelogin"}}, "exec: no program is started for it; use a token"),
        (None, {"auth-provider": {"name": "azure"}}, "auth-provider: use a token"),
        (None, {"username": "me", "password": "it"}, "username: use a token"),
        (None, {"token": "t", "as": "another"}, "as: give the account itself the role"),
        (None, {}, "the user has no credentials"),
        (None, {"client-certificate": "c.pem"}, "client-certificate and client-key: expected both or neither"),
    ],
)
def test_what_is_not_used_is_an_error_that_names_the_key(
    write: Write, cluster: dict[str, Any] | None, user: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(AccountError) as caught:
        load(write(cluster, user))
    assert message in str(caught.value)
    assert caught.value.kind == "config"


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ({"current-context": ""}, "not a kubeconfig: Expected `str` of length >= 1"),
        ({"current-context": "y"}, 'contexts: there is none with the name "y"'),
        ({"users": []}, 'users: there is none with the name "u"'),
        ({"users": None}, 'users: there is none with the name "u"'),
        ({"clusters": [{"name": "c"}]}, 'cluster "c": Object missing required field `server`'),
        ({"clusters": "none"}, "not a kubeconfig: Expected `array`, got `str` - at `$.clusters`"),
    ],
)
def test_a_kubeconfig_that_leads_nowhere_is_an_error(write: Write, top: dict[str, Any], message: str) -> None:
    file = write(**top)
    with pytest.raises(AccountError) as caught:
        load(file)
    assert str(caught.value).startswith(f"{file}: {message}")


def test_keys_without_a_value_and_entries_that_are_not_used_do_not_matter(write: Write) -> None:
    """As other programs write them."""
    empty = dict.fromkeys(
        ("tls-server-name", "certificate-authority-data", "proxy-url", "insecure-skip-tls-verify")
    )
    user = {"token": "t", "username": None, "exec": None, "client-certificate-data": None}
    content = yaml.safe_load(write(empty, user).read_text())
    content["clusters"] += [{"name": "other", "cluster": None}]
    content["users"] += [{"name": "other"}, {"name": "third", "user": {"exec": {"command": "x"}}}]
    content["contexts"] += [{"name": "other", "context": {"cluster": "other"}}]
    assert load(write(**content)).read_token() == "t"


def test_a_credential_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").symlink_to("/etc/kubernetes/no-kubelet.conf")
    with pytest.raises(AccountError, match=rf"^{tmp_path}/kubeconfig: cannot be read: No such file"):
        find_account(None, {"CREDENTIALS_DIRECTORY": str(tmp_path)})
    with pytest.raises(AccountError, match=r"put one at /nowhere/kubeconfig$"):
        find_account(None, {"CREDENTIALS_DIRECTORY": "/nowhere"})


def test_an_authority_file_that_is_empty_does_not_stand_for_the_systems(tmp_path: Path, write: Write) -> None:
    (tmp_path / "empty.crt").touch()
    with pytest.raises(AccountError, match="certificate-authority: no certificates in PEM form"):
        load(write({"certificate-authority": str(tmp_path / "empty.crt")}))


@pytest.mark.skipif(sys.platform == "win32", reason="there the key is in a file for a moment")
def test_a_client_certificate_needs_no_place_on_a_disk(
    monkeypatch: pytest.MonkeyPatch, write: Write, authority: Authority
) -> None:
    pem, key = authority.issue("nowhere", "/CN=nowhere", "extendedKeyUsage=clientAuth")
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    load(write(user={"client-certificate": str(pem), "client-key": str(key)})).ssl_context()


def test_text_that_is_no_yaml_is_an_error_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text("clusters:\n- {name: [}\n")
    with pytest.raises(AccountError, match=rf"^{file}:2: not YAML: "):
        load(file)
    with pytest.raises(AccountError, match=r"^/gone: cannot be read: No such file"):
        load(Path("/gone"))


def test_a_list_of_kubeconfigs_is_an_error(write: Write) -> None:
    file = write()
    with pytest.raises(
        AccountError, match=r"^\$KUBECONFIG: expected one file; got .*: name one with --kubeconfig"
    ):
        find_account(None, {"KUBECONFIG": f"{file}:{file}"})


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="only root can become another account")
def test_a_kubeconfig_that_the_account_may_not_see_is_an_error(tmp_path: Path) -> None:
    if sys.platform != "win32":
        os.seteuid(65534)
        try:
            with pytest.raises(AccountError, match=rf"^{tmp_path}/config: cannot be read: Permission denied$"):
                find_account(None, {"KUBECONFIG": f"{tmp_path}/config"})
        finally:
            os.seteuid(0)


def test_the_node_is_the_first_that_is_named(write: Write) -> None:
    access = Access(Store())
    bound = load(write(user={"token": access.issue_token(service_account("default", "agent", "vm-3"))}))
    environ = {"KUBERNETES_NODE": "vm-2"}
    assert find_node(bound, "vm-1", environ, "HOST") == ("vm-1", "--node")
    assert find_node(bound, None, environ, "HOST") == ("vm-2", "$KUBERNETES_NODE")
    assert find_node(bound, None, {}, "HOST") == ("vm-3", "the service account's token")
    for token in (access.issue_token(kubelet("vm-4")), "plain", "a.b.c", "a.eyJrdWJlcm5ldGVzLmlvIjogM30.c"):
        assert find_node(load(write(user={"token": token})), None, {}, "Host-9") == ("host-9", "the host name")


def test_a_name_that_no_node_has_is_an_error(write: Write) -> None:
    with pytest.raises(
        AccountError, match=r'^"my_host" \(the host name\) is not the name of a node: give it with'
    ):
        find_node(load(write()), None, {}, "MY_HOST")
    with pytest.raises(AccountError, match="is not the name of a node"):
        find_node(load(write()), "a/../b", {}, "host")


def test_a_token_of_a_pod_without_a_node_names_none(write: Write) -> None:
    claims = base64.urlsafe_b64encode(json.dumps({"kubernetes.io": {"pod": {"name": "p"}}}).encode()).decode()
    account = load(write(user={"token": f"a.{claims}.c"}))
    assert find_node(account, None, {}, "host") == ("host", "the host name")
