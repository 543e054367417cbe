"""Run by a child: is what a run would go on with, on these processes, what is stored?"""

import argparse
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vhajax import checkpoint, distributed, experiment, loop, sharding, step, train
from vhajax.data import train_batches
from vhajax.evaluate import open_data


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("expected", type=Path)
    parser.add_argument("experiment")
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--coordinator")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    options, fields = parser.parse_known_args(args)
    what = experiment.override(experiment.load(options.experiment), fields, "restored")
    flags = (options.coordinator, options.num_processes, options.process_id)
    place = distributed.find_place(distributed.Flags(*flags), what.hosts.join_timeout)
    peers = distributed.join(place, what.hosts)
    with peers.together():
        compare(what, options.run_dir, dict(np.load(options.expected)), peers)
    distributed.leave()
    return 0


def compare(what: Any, run: Path, expected: dict[str, np.ndarray], peers: Any) -> None:
    folder, manifest = open_data(what)
    mesh = sharding.make_mesh(what.mesh)
    start = checkpoint.latest(run)
    with jax.set_mesh(mesh):
        state = train._start_state(what, run, start, None, mesh)
        source = loop.Source(folder, manifest, np.zeros(0))
        batch = next(loop.Loop(what, run, source, mesh, peers, start)._batches())
        where = step.state_shardings(what, mesh)
    assert int(state.step) == start
    found = {f"params.{name}": x for name, x in state.params.items()}
    moments = checkpoint.named_leaves(state.opt_state)
    found |= {f"opt_state.{name}": x for name, x in moments.items()}
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert_shards_equal(name, x, expected[name])
    for name, x in state.params.items():
        assert x.sharding == where.params[name]
    size = what.data.batch_size
    for name, x in next(
        train_batches(
            folder, batch_size=size, seed=what.data.seed, num_steps=start + 1, start_step=start
        )
    ).items():
        assert_shards_equal(name, batch[name], x)


def assert_shards_equal(name: str, x: jax.Array, expected: np.ndarray) -> None:
    assert (x.shape, x.dtype) == (expected.shape, expected.dtype), name
    for shard in x.addressable_shards:
        assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes(), name
