"""Mutual TLS between the hosts of a run, from one shared secret.

Whoever knows the secret can make the same certificate authority, and with it a certificate for its own address; a
connection needs one on both sides. So there is nothing to copy around but the secret, and a worker takes orders from
nobody who does not know it.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import sys
from collections.abc import Sequence

from forge.types import UserError

SECRET = "FORGE_SECRET"
"""The environment variable that holds the secret."""
LEAST_LENGTH = 16
"""Characters. The certificates are public, so a short secret could be found by trying."""
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def secret() -> str | None:
    """The shared secret of this environment, or None.

    Raises:
        UserError: it is too short.
    """
    value = os.environ.get(SECRET)
    if value is not None and len(value) < LEAST_LENGTH:
        raise UserError(
            f"{SECRET} must have at least {LEAST_LENGTH} characters, got {len(value)}: whoever guesses it may run "
            "programs here. Make one with: openssl rand -hex 16"
        )
    return value


def scheme_for(addresses: Sequence[str]) -> str:
    """ "tls" where there is a secret, "tcp" for loopback without one.

    Raises:
        UserError: another address, and no secret.
    """
    if secret() is not None:
        return "tls"
    outside = [a for a in addresses if not ipaddress.ip_address(a).is_loopback]
    if outside:
        raise UserError(
            f"{outside[0]} can be reached from other machines, and whoever reaches a forge worker may run programs "
            f"there: set the same {SECRET} on every machine. Make one with: openssl rand -hex 16"
        )
    return "tcp"


def use_tls(address: str) -> None:
    """Gives this process, which is reached at this IP address, its certificate; nothing without a secret.

    Monarch reads it from the environment, once, when it is imported.
    """
    if secret() is None:
        return
    assert "monarch" not in sys.modules, "certificates must be there before Monarch is imported"
    os.environ.update(tls_environment(address))


def tls_environment(address: str) -> dict[str, str]:
    """The variables that Monarch reads; their values are the certificates themselves (PEM), so no file is written."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    shared = secret()
    assert shared is not None
    seed = hashlib.scrypt(shared.encode(), salt=b"forge worker", n=2**14, r=8, p=1, dklen=48)
    authority_key = ec.derive_private_key(int.from_bytes(seed) % (_P256_ORDER - 1) + 1, ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "forge run")])
    now = datetime.datetime.now(datetime.UTC)

    def signed(subject: x509.Name, public_key: ec.EllipticCurvePublicKey, extension: x509.ExtensionType) -> str:
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
            .not_valid_after(now + datetime.timedelta(days=365))
            .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
            .sign(authority_key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM).decode()

    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "forge host")])
    return {
        "HYPERACTOR_TLS_CA": signed(
            authority, authority_key.public_key(), x509.BasicConstraints(ca=True, path_length=None)
        ),
        "HYPERACTOR_TLS_CERT": signed(subject, key.public_key(), names),
        "HYPERACTOR_TLS_KEY": private.decode(),
    }
