"""How the log is written: jaxpaged's own tree of loggers and uvicorn's, in one format, to stderr."""

from __future__ import annotations

import logging

LOGGER, _UVICORN = "jaxpaged", "uvicorn"
_FORMAT = "%(asctime)s %(levelname)-7s [%(request_id)s] %(message)s"


def configure_logging(level: str) -> None:
    """Sends the log from `level` on to stderr, and nothing of it to the root logger; uvicorn sets its own level."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.addFilter(add_request_id)
    for name in (LOGGER, _UVICORN):
        logger = logging.getLogger(name)
        for other in list(logger.handlers):
            logger.removeHandler(other)
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger(LOGGER).setLevel(level.upper())


def add_request_id(record: logging.LogRecord) -> bool:
    """Gives a record the id of the HTTP request that it was written for, unless it has one; "-" if for none."""
    from server.watch.http_requests import CURRENT  # with FastAPI, which is not to hold up the engine's start

    request = CURRENT.get()
    if "request_id" not in record.__dict__:
        record.request_id = "-" if request is None else request.request_id
    return True
