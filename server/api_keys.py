"""API keys: who may ask, and whose cached prefixes are whose."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from jaxpaged.errors import ConfigError, reason
from server.config import ServerConfig


def configured_keys(config: ServerConfig) -> tuple[str, ...]:
    """The keys that the options give, those in a file included.

    Raises:
      ConfigError: the file cannot be read or holds no key.
    """
    if config.api_key_file is None:
        return config.api_key
    try:
        lines = Path(config.api_key_file).read_text("utf-8-sig").splitlines()  # some editors begin it with a mark
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"api_key_file={config.api_key_file!r} cannot be read: {reason(e)}") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"api_key_file={config.api_key_file!r} holds no key")
    return (*config.api_key, *keys)


class ApiKeys:
    """A set of keys, known by their digests: so that no comparison depends on their length or their bytes."""

    def __init__(self, keys: Sequence[str]):
        """Args: keys: none of them blank, as `ServerConfig` and `configured_keys` see to."""
        assert all(key.strip() for key in keys), "a blank key would let in who has none"
        self._digests = [sha256(key.strip().encode()).digest() for key in keys]

    def __len__(self) -> int:
        return len(set(self._digests))

    def tenant(self, authorization: bytes) -> bytes | None:
        """Who sent this `Authorization` header: the digest of the key; None if it holds none of the keys."""
        scheme, _, key = authorization.partition(b" ")
        digest = sha256(key.strip()).digest()
        # With every key, so that the time does not tell which one it is.
        matches = [known for known in self._digests if hmac.compare_digest(digest, known)]
        return matches[0] if matches and key.strip() and scheme.lower() == b"bearer" else None


def tenant_salt(tenant: bytes, salt: str | None) -> str:
    """The `cache_salt` of a tenant's request. No other tenant can have the same, whatever it sends as its own."""
    given = b"" if salt is None else b"salt:" + salt.encode()
    return hmac.new(tenant, given, sha256).hexdigest()
