"""What every test can count on: JAX on the CPU, no hub, caches of the test session's own, time for its examples."""

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Before anything imports jax or transformers. Caches go to a folder of the session's own: tests neither read what an
# earlier version compiled nor leave files in the user's home.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "XDG_CACHE_HOME" not in os.environ:  # pytest's workers have that of the process that started them
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jaxpaged-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

settings.register_profile("any machine", deadline=None)  # a busy one may take long for an example
settings.load_profile("any machine")


@pytest.fixture(scope="module")
def frozen_heap() -> Iterator[None]:
    """For tests that take processor time: as in a server, garbage is not sought in what was there before.

    Here that is what all earlier tests of the process have left, and a look at it may take a second.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
