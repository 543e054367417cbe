"""Benchmarks kept with the code: medians of interleaved rounds, never part of a test."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vhajax import config, decode, sharding, step, transformer
from vhajax.attention import build
from vhajax.inference import decoder

Row = dict[str, Any]
READ = "read 1 GiB"


def bench_train(rounds: int) -> list[Row]:
    """Training tokens/s, float32, AdamW: 2 layers, D 256, 4 × 64 heads, FFN 1024, batch 8 × 256."""
    cases = {f"V {vocab}": _train_case(vocab) for vocab in (256, 32_000)}
    times = interleaved(cases, rounds)
    return [
        {"case": name, "tokens_per_second": round(8 * 256 / seconds), "ms": round(1e3 * seconds, 1)}
        for name, seconds in times.items()
    ]


def _train_case(vocab: int) -> Callable[[], Any]:
    experiment = config.Experiment(
        model=config.Model(
            vocab_size=vocab,
            dim=256,
            num_layers=2,
            attention=config.GQA(num_heads=4, num_kv_heads=4, head_dim=64),
            ffn_dim=1024,
            dtype="float32",
        ),
        data=config.Data(batch_size=8, seq_len=256),
        optim=config.Optim(name="adamw", matrix_lr=1e-3),
    )
    tokens = np.random.default_rng(0).integers(0, vocab, (8, 257)).astype(np.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.tile(np.arange(256, dtype=np.int32), (8, 1)),
        "segments": np.ones((8, 256), np.int32),
        "weights": np.ones((8, 256), np.float32),
    }
    with jax.set_mesh(sharding.make_mesh(experiment.mesh)):
        state = step.init_state(experiment)
    train_step = jax.jit(step.make_train_step(experiment), donate_argnums=0)

    def run() -> jax.Array:
        nonlocal state
        with jax.set_mesh(sharding.make_mesh(experiment.mesh)):
            state, metrics = train_step(state, batch)
        return metrics["loss"]

    return run


def bench_decode(rounds: int) -> list[Row]:
    """One layer's decode step over a full cache, batch 1, N 16, H 128, against reading its bytes.

    The floor is the bytes of cache and weights over the read bandwidth, measured in the same rounds
    as the best XLA sum over 1 GiB. The layer has a width of 128, so that its cache is nearly all of
    its bytes. over_mha: time over that of MHA in float32 at the same context.
    """
    common: dict[str, Any] = {"head_dim": 128, "num_heads": 16}
    mechanisms: dict[str, config.Attention] = {
        "MHA": config.GQA(num_kv_heads=16, **common),
        "GQA-2": config.GQA(num_kv_heads=2, **common),
        "LRKV R 64 none": config.LRKV(rank=64, position="none", **common),
        "LRKV R 64 full": config.LRKV(rank=64, position="full", **common),
        "MLA C 512 + 64": config.MLA(latent_dim=512, rope_dim=64, **common),
    }
    rows = []
    for context in (8192, 32_768):
        cases: dict[str, Callable[[], Any]] = {READ: read_case()}
        sizes = {}
        for dtype in ("float32", "bfloat16"):
            for name, attention in mechanisms.items():
                case = f"{name}, {context // 1024}k, {dtype}"
                cases[case], sizes[case] = _layer_case(attention, context, dtype)
        times = interleaved(cases, rounds)
        bandwidth = 2**30 / times.pop(READ)
        base = times[f"MHA, {context // 1024}k, float32"]
        for name, seconds in times.items():
            floor = sizes[name] / bandwidth
            row: Row = {"case": name, "ms": round(1e3 * seconds, 2)}
            row |= {"floor_ms": round(1e3 * floor, 2), "of_floor": round(floor / seconds, 3)}
            row |= {"over_mha": round(seconds / base, 3)}
            rows.append(row | {"read_GB_per_s": round(bandwidth / 1e9, 1)})
    return rows


def _layer_case(
    attention: config.Attention, context: int, dtype: str
) -> tuple[Callable[[], Any], int]:
    """A step that appends to a full cache but for one slot and reads it, and its bytes."""
    model = config.Model(dim=128, attention=attention, norm="weightless")
    layer = build(model, jax.random.key(0))
    held = layer.init_cache(1, context, jnp.dtype(dtype))
    fill = jax.jit(lambda c: jax.tree.map(lambda x: x + 0.01, c), donate_argnums=0)
    held = fill(held)
    size = sum(x.nbytes for x in jax.tree.leaves((held, sharding.named_arrays(layer))))
    x = jnp.ones((1, 1, 128), jnp.dtype(dtype))
    last, valid = jnp.full((1, 1), context - 1, jnp.int32), jnp.ones((1, 1), bool)
    step = jax.jit(lambda layer, x, held: layer.extend(x, held, last, valid), donate_argnums=2)

    def run() -> jax.Array:
        nonlocal held
        out, held = step(layer, x, held)
        return out

    return run, size


def bench_generate(rounds: int) -> list[Row]:
    """Decode tokens/s of the demo's models at batch 1 and 8, 64 tokens after a prompt of 64.

    The floor is the bytes of the weights over the read bandwidth, measured in the same rounds as
    the best XLA sum over 1 GiB.
    """
    from vhajax import experiment

    cases: dict[str, Callable[[], Any]] = {READ: read_case()}
    sizes = {}
    for name in ("demo_gqa", "demo_vha"):
        cfg = experiment.load(name).model
        model = decoder(cfg, transformer.init(cfg, 0))
        sizes[name] = sum(x.nbytes for x in sharding.named_arrays(model).values())
        for batch in (1, 8):
            cases[f"{name} batch {batch}"] = _decode_case(model, batch)
    times = interleaved(cases, rounds)
    bandwidth = 2**30 / times.pop(READ)
    rows = []
    for name, seconds in times.items():
        batch = int(name.split()[-1])
        floor = sizes[name.split()[0]] / bandwidth
        rows.append(
            {
                "case": name,
                "tokens_per_second": round(64 * batch / seconds),
                "ms_per_step": round(1e3 * seconds / 64, 3),
                "floor_ms": round(1e3 * floor, 3),
                "read_GB_per_s": round(bandwidth / 1e9, 1),
            }
        )
    return rows


def read_case() -> Callable[[], Any]:
    values = jnp.ones(2**28, jnp.float32)
    total = jax.jit(jnp.sum)
    return lambda: total(values)


def _decode_case(model: transformer.Transformer, batch: int) -> Callable[[], Any]:
    prompts = np.random.default_rng(0).integers(2, model.cfg.vocab_size, (batch, 64)).tolist()

    def run() -> jax.Array:
        tokens = list(decode.generate(model, prompts, 65))
        return jnp.asarray(len(tokens))

    return run


def bench_compile(rounds: int) -> list[Row]:
    """Seconds to trace and compile the demo's training step at 4 and 24 layers, scanned."""
    cases = {f"{layers} layers": _compile_case(layers) for layers in (4, 24)}
    times = interleaved(cases, rounds, warm=False)
    return [{"case": name, "seconds": round(seconds, 2)} for name, seconds in times.items()]


def _compile_case(layers: int) -> Callable[[], Any]:
    from vhajax import experiment

    base = experiment.load("demo_vha")
    cfg = dataclasses.replace(base, model=dataclasses.replace(base.model, num_layers=layers))
    shape = (cfg.data.batch_size, cfg.data.seq_len)

    mesh = sharding.make_mesh(cfg.mesh)
    with jax.set_mesh(mesh):
        state = step.init_state(cfg)
    ints = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=step.batch_sharding(mesh))
    floats = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=step.batch_sharding(mesh))
    names = ("tokens", "targets", "positions", "segments")
    batch = {**dict.fromkeys(names, ints), "weights": floats}

    def run() -> jax.Array:
        jax.clear_caches()
        with jax.set_mesh(mesh):
            jax.jit(step.make_train_step(cfg), donate_argnums=0).lower(state, batch).compile()
        return jnp.zeros(())

    return run


def interleaved(
    cases: dict[str, Callable[[], Any]], rounds: int, *, warm: bool = True
) -> dict[str, float]:
    """Median seconds of each case, every case once a round; the best of reading memory.

    A case that returns a float has timed itself.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(rounds + warm):
        for name, run in cases.items():
            start = time.perf_counter()
            told = jax.block_until_ready(run())
            seconds = told if isinstance(told, float) else time.perf_counter() - start
            if i or not warm:
                times[name].append(seconds)
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    return middle | {READ: min(times[READ])} if READ in times else middle


def table(rows: list[Row]) -> str:
    """Rows of equal keys as aligned text."""
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
