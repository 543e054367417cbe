"""vhajax: language models whose attention keeps the KV cache small, in JAX.

The interface for servers, imported when first used:

    load, init_cache, prefill, decode_step, generate, Sampling
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vhajax.decode import decode_step, generate, init_cache, prefill
    from vhajax.inference import load
    from vhajax.sampling import Sampling

__all__ = ["Sampling", "decode_step", "generate", "init_cache", "load", "prefill"]

_HOMES = {
    "load": "vhajax.inference",
    "init_cache": "vhajax.decode",
    "prefill": "vhajax.decode",
    "decode_step": "vhajax.decode",
    "generate": "vhajax.decode",
    "Sampling": "vhajax.sampling",
}


def __getattr__(name: str) -> Any:
    """JAX takes seconds to import; `vhajax -h` must not pay for it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'vhajax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
