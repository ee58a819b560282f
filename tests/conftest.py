"""What every test can count on: JAX on the CPU, no hub, caches of the test session's own, time for its examples."""

import atexit
import os
import shutil
import tempfile

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
