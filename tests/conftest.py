"""Eight simulated devices for every test; code without a mesh runs on the first of them."""

import gc
import os
import sys

import pytest

assert "jax" not in sys.modules, "these settings come too late once JAX is imported"
os.environ["JAX_PLATFORMS"] = "cpu"
# Compiling, not computing, is what these small programs cost.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

import jax  # noqa: E402


@pytest.fixture(scope="module")
def programs_kept():
    """Compiled programs of a file's tests are kept on disk, for its later tests and processes."""
    import tiny

    with tiny.programs_kept():
        yield


@pytest.fixture(scope="module", autouse=True)
def _programs_end_with_their_file(request):
    """A process may map 65,530 pieces of memory, of which compiled programs take several each."""
    yield
    for x in vars(request.module).values():
        if hasattr(x, "cache_clear"):
            x.cache_clear()
    jax.clear_caches()
    gc.collect()
