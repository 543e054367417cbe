"""Eight simulated devices for every test; code without a mesh runs on the first of them."""

import os
import sys

assert "jax" not in sys.modules, "these settings come too late once JAX is imported"
os.environ["JAX_PLATFORMS"] = "cpu"
# Compiling, not computing, is what these small programs cost.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
