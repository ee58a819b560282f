"""The page at / and that of the API at /docs, as they are served: a shell without data, read once at import.

Nothing in it comes from elsewhere, and its policy has the browser hold it to that: scripts and styles are files of this
folder, and requests go to this server only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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


def _file(content: bytes, media_type: str) -> PageFile:
    return PageFile(content, media_type, f'"{sha256(content).hexdigest()[:32]}"')


_BY_NAME = {
    path.name: _file(path.read_bytes(), _KINDS[path.suffix])
    for path in sorted(Path(__file__).parent.iterdir())
    if path.suffix in _KINDS
}
FILES = {
    "/": _BY_NAME.pop("index.html"),
    "/docs": _BY_NAME.pop("docs.html"),
    **{f"/page/{name}": file for name, file in _BY_NAME.items()},
}
"""Each file by its path."""
_LINKS = {"/": b'href="./"', "/docs": b'href="docs"'}
"""How the one page names the other; a line each."""


@functools.cache
def served_files(*, page: bool, docs: bool) -> dict[str, PageFile]:
    """Each file by its path, of a server that has these pages. The one does not link to the other if it is not there.

    Args:
      page: the one at /.
      docs: the one at /docs.
    """
    if not page and not docs:
        return {}
    missing = [path for path, is_served in (("/", page), ("/docs", docs)) if not is_served]
    return {path: _without_links(file, missing) for path, file in FILES.items() if path not in missing}


def _without_links(file: PageFile, paths: Sequence[str]) -> PageFile:
    if not paths or file.media_type != _KINDS[".html"]:
        return file
    lines = file.content.splitlines(keepends=True)
    kept = [line for line in lines if not any(_LINKS[path] in line for path in paths)]
    return _file(b"".join(kept), file.media_type)
