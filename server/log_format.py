"""How jaxpaged's own log is written: one tree of loggers, "jaxpaged", to stderr."""

from __future__ import annotations

import logging

from server.http_watch import CURRENT

LOGGER = "jaxpaged"
_FORMAT = "%(asctime)s %(levelname)-7s [%(request_id)s] %(message)s"


def configure_logging(level: str) -> None:
    """Sends the log from `level` on to stderr, and nothing of it to the root logger."""
    logger = logging.getLogger(LOGGER)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.addFilter(add_request_id)
    for other in list(logger.handlers):
        logger.removeHandler(other)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


def add_request_id(record: logging.LogRecord) -> bool:
    """Gives a record the id of the HTTP request that it was written for; "-" if for none."""
    request = CURRENT.get()
    record.request_id = "-" if request is None else request.request_id
    return True
