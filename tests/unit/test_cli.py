"""The `forge` command: what it says, and with which exit status."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from forge import cli
from forge.config import DatasetConfig
from forge.doctor import examine
from forge.launcher import run_worker
from forge.service.hosts import split_address
from forge.service.trust import tls_environment
from forge.types import UserError


def test_help_needs_neither_torch_nor_two_seconds():
    code = (
        "import sys; from forge.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print('torch' in sys.modules, 'monarch' in sys.modules)"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"
    assert "worker" in done.stdout
    assert time.monotonic() - started < 10  # 0.3 s on an idle machine


def test_a_worker_that_others_could_reach_needs_a_secret(monkeypatch):
    monkeypatch.delenv("FORGE_SECRET", raising=False)
    monkeypatch.setattr("forge.service.hosts.interface_of", lambda address: "eth0")
    with pytest.raises(UserError, match="FORGE_SECRET"):
        run_worker("10.1.2.3:9000")


def test_a_short_secret_is_refused(monkeypatch):
    monkeypatch.setenv("FORGE_SECRET", "short")
    with pytest.raises(UserError, match="at least 16 characters, got 5"):
        run_worker("127.0.0.1:0")


@pytest.mark.parametrize("listen", ["localhost", "1.2.3", "127.0.0.1:port", "300.1.1.1:80"])
def test_a_worker_listens_at_an_address_and_a_port(listen):
    with pytest.raises(UserError, match="ADDRESS or ADDRESS:PORT"):
        run_worker(listen)


def test_the_exit_status_of_wrong_input_is_2(capsys):
    with pytest.raises(SystemExit) as info:
        cli.main(["worker", "--listen", "203.0.113.9:1"])
    assert info.value.code == 2
    assert "no network interface of this machine has the address 203.0.113.9" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["node", "node:", ":80", "node:0", "node:70000"])
def test_a_host_is_an_address_and_a_port(name):
    with pytest.raises(UserError, match="must be ADDRESS:PORT"):
        split_address(name)


def test_two_sides_with_one_secret_trust_each_other_and_nobody_else(monkeypatch):
    """The authority is the same on both sides, and it signed what each shows; another secret makes another one."""
    from cryptography import x509

    def issued(secret, address):
        monkeypatch.setenv("FORGE_SECRET", secret)
        made = tls_environment(address)
        load = [x509.load_pem_x509_certificate(made[f"HYPERACTOR_TLS_{n}"].encode()) for n in ("CA", "CERT")]
        return load[0], load[1]

    (ca, own), (other_ca, other) = issued("a" * 16, "10.0.0.1"), issued("a" * 16, "10.0.0.2")
    assert ca.public_key() == other_ca.public_key()
    other.verify_directly_issued_by(ca)
    own.verify_directly_issued_by(other_ca)
    assert own.public_key() != other.public_key()
    stranger_ca, stranger = issued("b" * 16, "10.0.0.2")
    with pytest.raises(Exception):  # noqa: B017 (cryptography's InvalidSignature)
        stranger.verify_directly_issued_by(ca)
    assert stranger_ca.public_key() != ca.public_key()


def test_the_doctor_says_where_the_data_is(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    found = {finding.what: finding for finding in examine(DatasetConfig(path=str(tmp_path)))}
    assert "1 files" in found["data"].value
    assert found["data"].problem == ""
    assert "cores" in found["CPU"].value
    assert "torchmonarch 0.7.0" in found["versions"].value
    missing = {finding.what: finding for finding in examine(DatasetConfig(path="owner/set"))}["data"]
    assert "not on this machine" in missing.value
    assert "HF_HUB_OFFLINE" in missing.problem  # as the tests set it
