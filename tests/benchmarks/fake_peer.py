"""An engine that answers at once and says how long it would have taken."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.peer_process import PeerFailedError


class FakePeer:
    """Stands in for `peer_process.Peer`.

    Attributes:
      asked: every piece of work that it was given.
      dies_at: the job at which it ends.
    """

    def __init__(self, name: str, seconds: Callable[[Mapping[str, Any]], float], *, dies_at: str = ""):
        self.name, self.closed, self.asked = name, False, []
        self.ready = {"seconds": 3.0, "versions": {name: "0.1"}}
        self._seconds, self._dies_at = seconds, dies_at

    def run(self, work: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        self.asked.append(work)
        if self._dies_at and work["seed"].startswith(self._dies_at):
            raise PeerFailedError("out of luck")
        seconds = self._seconds(work)
        outputs = [[1] * work["output_len"]] * work["num_prompts"]
        return {"seconds": seconds, "first_token_s": seconds / 4, "token_ids": outputs}

    def close(self) -> None:
        self.closed = True
