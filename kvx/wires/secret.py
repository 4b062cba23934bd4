"""The shared secret of a wire: a file that both sides have. It proves who asks and who answers, and never travels itself."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from kvx.errors import BadArgument

HOME = Path("~/.kvx/secret")  # of a user who names no other
LEAST_BYTES, MOST_BYTES = 32, 4096  # who overhears a proof can try secrets on it for ever: it is a random one, never a password
PROOF_BYTES = 32


class Secret:
    """Nothing of it is in its text or its errors."""

    def __init__(self, key: bytes) -> None:
        if not LEAST_BYTES <= len(key) <= MOST_BYTES:
            raise BadArgument(
                f"a secret has {LEAST_BYTES} to {MOST_BYTES} characters, drawn at random; this has {len(key)}. "
                "`kvx prefill --listen` makes one where there is no file."
            )
        self._key = hashlib.blake2b(key, digest_size=32, person=b"kvx secret 1").digest()

    def __repr__(self) -> str:
        return "Secret()"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise BadArgument("Secret: it is not pickled; give the other process the name of its file.")

    def proof(self, label: str, *parts: bytes) -> bytes:
        """Who has the secret can make it, of these parts and for this label alone."""
        text = b"".join(len(part).to_bytes(8, "big") + part for part in (label.encode(), *parts))
        return hmac.digest(self._key, text, "sha256")

    def proves(self, proof: bytes, label: str, *parts: bytes) -> bool:
        """In the same time, however much of it is right."""
        return hmac.compare_digest(proof, self.proof(label, *parts))


def read_secret(path: Path) -> Secret:
    """Refused where it is missing, or where others than its owner may read it."""
    path = path.expanduser()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for its writer
    except FileNotFoundError:
        raise BadArgument(
            f"there is no secret at {path}. `kvx prefill --listen` makes it: copy that file here, readable by you alone "
            "(chmod 600), or name another: --secret-file FILE."
        ) from None
    except OSError as error:
        raise BadArgument(f"the secret at {path} cannot be read: {error.strerror}. Name another: --secret-file FILE.") from None
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise BadArgument(f"the secret at {path} is no file. Name one: --secret-file FILE.")
        if mode & 0o077:
            raise BadArgument(f"the secret at {path} can be read or changed by others (mode {mode & 0o777:03o}): chmod 600 {path}")
        data = os.read(fd, MOST_BYTES + 1)
    finally:
        os.close(fd)
    try:
        return Secret(data.strip())
    except BadArgument as error:
        raise BadArgument(f"{path}: {error}") from None


def read_or_make_secret(path: Path) -> tuple[Secret, bool]:
    """Made where there is none, with mode 600; and whether it was. Two that make it at once get the same."""
    path = path.expanduser()
    if os.path.lexists(path):
        return read_secret(path), False
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(fd, 0o600)  # whatever the umask
            os.write(fd, f"{secrets.token_hex(32)}\n".encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            os.link(partial, path)  # whole, or not there; and never over another's
        except FileExistsError:
            return read_secret(path), False
    except OSError as error:
        raise BadArgument(f"no secret can be made at {path}: {error.strerror}. Name another place: --secret-file FILE.") from None
    finally:
        with suppress(OSError):
            partial.unlink()
    return read_secret(path), True
