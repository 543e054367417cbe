"""Joining a run of several processes: where each one stands, and the start of JAX's runtime."""

import os
import warnings
from dataclasses import dataclass

from vhajax.config import LONG, Hosts
from vhajax.errors import PeerLostError, UserError
from vhajax.peers import ALONE, Peers, Place


@dataclass(frozen=True)
class Flags:
    """What the command line says; None: to be found in the environment."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def find_place(flags: Flags, timeout: int) -> Place:
    """This process among those of its run, from flags or from SLURM's, GKE's or a TPU VM's word.

    timeout: seconds for which a name that is not known yet is asked for.
    Raises:
      UserError: some of the flags are there and some are not, or they make no sense.
      PeerLostError: process 0's host is not known in time.
    """
    given = (flags.coordinator, flags.num_processes, flags.process_id)
    if any(value is not None for value in given):
        return _from_flags(*given)
    # JAX knows the clusters, but has no public function that only asks them.
    from jax._src.clusters import ClusterEnv

    try:
        with warnings.catch_warnings(action="ignore"):  # Kubernetes needs flags: see launch/
            address, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
                None, None, None, None, None, timeout
            )
    except (RuntimeError, OSError) as error:
        raise PeerLostError(
            f"Process 0's host cannot be found ({error}); is it running?"
        ) from error
    if address is None or count is None or index is None:
        return ALONE
    return Place(address, count, index, tuple(devices) if devices else None)


def _from_flags(coordinator: str | None, count: int | None, index: int | None) -> Place:
    if coordinator is None or count is None or index is None:
        raise UserError(
            "--coordinator, --num-processes and --process-id go together, but --coordinator is "
            f"{coordinator}, --num-processes {count} and --process-id {index}; give all or none."
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--coordinator is {coordinator!r}; give HOST:PORT, as in node0:8476.")
    if count < 1 or not 0 <= index < count:
        raise UserError(
            f"--process-id is {index} and --num-processes {count}; indices run from 0 to one less "
            "than the number."
        )
    return Place(coordinator, count, index)


def join(place: Place, hosts: Hosts) -> Peers:
    """Waits for all processes, then starts JAX's runtime; call before anything uses a device.

    Raises:
      PeerLostError: somebody did not join in time.
    """
    peers = Peers(place, hosts)
    if place.count == 1:
        return peers
    import jax

    if "cpu" in (jax.config.jax_platforms or ""):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # `Peers` sees who is lost before JAX does, which would say less and abort.
    patience = max(100, 3 * hosts.silence_timeout)
    peers.beat("starting JAX", patience=LONG)
    jax.distributed.initialize(
        place.address,
        place.count,
        place.index,
        local_device_ids=place.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=hosts.join_timeout,
        heartbeat_timeout_seconds=patience,
        shutdown_timeout_seconds=hosts.join_timeout,
    )
    return peers


def leave() -> None:
    """Ends JAX's runtime, where it was started."""
    import jax

    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
