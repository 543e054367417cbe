"""Where a process finds its place among those of its run."""

import pytest

from vhajax import distributed
from vhajax.distributed import Flags, find_place
from vhajax.errors import PeerLostError, UserError
from vhajax.peers import ALONE, Place

ENVIRONMENT = ("SLURM_", "OMPI_", "TPU_", "MEGASCALE_", "KUBERNETES_", "JAX_COORD")


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    """No cluster around this test."""
    import os

    for name in [name for name in os.environ if name.startswith(ENVIRONMENT)]:
        monkeypatch.delenv(name)


def test_a_machine_of_its_own():
    assert find_place(Flags(), 1) == ALONE
    assert distributed.join(ALONE, None).count == 1


def test_flags():
    assert find_place(Flags("node0:8476", 4, 3), 1) == Place("node0:8476", 4, 3)
    assert find_place(Flags("[::1]:1", 1, 0), 1) == Place("[::1]:1", 1, 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (Flags("a:1", 2, None), "--num-processes 2 and --process-id None; give all or none"),
        (Flags(None, None, 0), "--coordinator is None"),
        (Flags("a", 2, 0), "--coordinator is 'a'; give HOST:PORT"),
        (Flags(":80", 2, 0), "--coordinator is ':80'"),
        (Flags("a:b", 2, 0), "--coordinator is 'a:b'"),
        (Flags("a:0", 2, 0), "--coordinator is 'a:0'"),
        (Flags("a:99999", 2, 0), "--coordinator is 'a:99999'"),
        (Flags("a:1", 2, 2), "--process-id is 2 and --num-processes 2; indices run from 0"),
        (Flags("a:1", 2, -1), "--process-id is -1"),
        (Flags("a:1", 0, 0), "--num-processes 0"),
    ],
)
def test_flags_that_make_no_sense(flags, words):
    with pytest.raises(UserError) as caught:
        find_place(flags, 1)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node[3,5-9]", "node3"),
        ("gpu-a[012-015],gpu-b1", "gpu-a012"),
        ("x1,x2", "x1"),
    ],
)
def test_slurm(nodes, first, monkeypatch):
    """srun's environment; the port follows from the job, a task has the device of its number."""
    values = {
        "SLURM_JOB_ID": "4100",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NTASKS": "16",
        "SLURM_PROCID": "9",
        "SLURM_LOCALID": "1",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert find_place(Flags(), 1) == Place(f"{first}:{61440 + 4}", 16, 9, (1,))
    assert find_place(Flags("a:1", 2, 1), 1) == Place("a:1", 2, 1)  # flags come first


@pytest.fixture
def tpu(monkeypatch):
    from jax._src.clusters import cloud_tpu_cluster, cluster

    for module in (cloud_tpu_cluster, cluster):
        monkeypatch.setattr(module, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda _: ("", 404))  # as on GKE
    return cloud_tpu_cluster


def test_gke_with_tpus(tpu, monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost,b.example,c.example")
    monkeypatch.setenv("TPU_WORKER_ID", "2")
    assert find_place(Flags(), 1) == Place(f"localhost:{tpu.coordinator_port}", 3, 2)


def test_a_tpu_vm(tpu, monkeypatch):
    told = {"agent-worker-number": "1", "worker-network-endpoints": "x:y:127.0.0.1,x:y:127.0.0.2"}
    monkeypatch.setattr(tpu, "get_metadata", lambda name: (told.get(name, ""), 200))
    assert find_place(Flags(), 1) == Place(f"127.0.0.1:{tpu.coordinator_port}", 2, 1)


def test_a_host_that_no_name_server_knows(tpu, monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "nobody.invalid,b")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    monkeypatch.setattr(tpu.time, "sleep", lambda _: None)
    with pytest.raises(PeerLostError, match=r"Process 0's host cannot be found \(.*nobody.invalid"):
        find_place(Flags(), 1)


@pytest.mark.filterwarnings("error")
def test_kubernetes_without_flags_is_one_process(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert find_place(Flags(), 1) == ALONE
