"""The page at / and that of the API at /docs, as they are served: a shell without data, read once at import.

Nothing in it comes from elsewhere, and its policy has the browser hold it to that: scripts and styles are files of this
folder, and requests go to this server only.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Cache-Control": "no-cache",  # kept, but asked about with its ETag
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True)
class PageFile:
    """Attributes:
    content: its bytes.
    media_type: what they are.
    etag: names this content.
    """

    content: bytes
    media_type: str
    etag: str

    @property
    def headers(self) -> dict[str, str]:
        """What is sent with it, but for its type and length."""
        return {**_HEADERS, "ETag": self.etag}


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    return PageFile(content, _KINDS[path.suffix], f'"{sha256(content).hexdigest()[:32]}"')


_BY_NAME = {path.name: _read(path) for path in sorted(Path(__file__).parent.iterdir()) if path.suffix in _KINDS}
FILES = {
    "/": _BY_NAME.pop("index.html"),
    "/docs": _BY_NAME.pop("docs.html"),
    **{f"/page/{name}": file for name, file in _BY_NAME.items()},
}
"""Each file by its path."""
