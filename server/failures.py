"""Choices of which nothing came: what their clients are told, and when that is all there is to answer."""

from __future__ import annotations

from collections.abc import Iterable

from jaxpaged.core.request import FAILURES, GRAMMAR_STUCK
from jaxpaged.core.step import NONE_ALLOWED
from jaxpaged.engine.output import RequestOutput
from server.errors import APIError, logger, without_details

_OWN_FAULTS = str(FAILURES[NONE_ALLOWED].stop_reason), GRAMMAR_STUCK  # how a reason begins that is the client's


class Failures:
    """Which choices of a request failed. Once they all have, there is nothing to answer but an error.

    As long as one has not, the others' `finish_reason` is "error", and `stop_reason` what a client may know of why.
    """

    def __init__(self, num_choices: int, request_id: str):
        self._left, self._request_id = num_choices, request_id

    def check(self, outputs: Iterable[RequestOutput]) -> None:
        """Counts those that failed in these outputs: all there are, or what is new.

        Raises:
          APIError: none is left.
        """
        for output in outputs:
            for choice in output.outputs:
                if choice.finish_reason == "error":
                    self._left -= 1
                    logger.debug("request %s: generation failed: %s", self._request_id, choice.stop_reason)
                    choice.stop_reason = told_reason(choice.stop_reason)
                    if not self._left:
                        raise _failed(choice.stop_reason)


def told_reason(reason: int | str | None) -> str:
    """Why a choice failed, as its client may know: of a fault of ours, no details."""
    return str(reason) if str(reason).startswith(_OWN_FAULTS) else without_details(str(reason))


def _failed(reason: str) -> APIError:
    status = 400 if reason.startswith(_OWN_FAULTS) else 500
    param = "structured_outputs" if reason.startswith(GRAMMAR_STUCK) else None
    return APIError(status, f"the generation failed: {reason}", param=param, code="generation_error")
