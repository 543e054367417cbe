"""vhajax beside transformers on the same weights: prefill and decode, medians of rounds."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vhajax import decode, inference, layers, sharding
from vhajax.bench import READ, Row, interleaved, read_case
from vhajax.errors import UserError
from vhajax.huggingface import load
from vhajax.sampling import GREEDY
from vhajax.transformer import Transformer

LENGTH, NEW, BATCHES = 128, 128, (1, 8)
RIVAL = Path(__file__).with_name("rival.py")


class Rival:
    """A process of another interpreter that times transformers on a folder."""

    def __init__(self, python: str, folder: Path):
        command = [python, str(RIVAL), str(folder), str(NEW)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise UserError(f"--python is {python}, which does not run ({error}).") from error
        if self._read() != "ready":
            raise UserError(
                f"--python is {python}, which cannot load {folder} with torch and transformers; "
                "name an interpreter that has them."
            )

    def _read(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def seconds(self, what: str, batch: int) -> float:
        assert self._process.stdin
        self._process.stdin.write(f"{what} 0 {batch} {LENGTH}\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def bench(folder: Path, python: str, rounds: int) -> list[Row]:
    """Float32, 128 prompt tokens and 128 new ones, batch 1 and 8.

    The floor is the bytes of the weights over the read bandwidth, measured in the same rounds as
    the best XLA sum over 1 GiB; the cache, which is little here, is left out.

    Args:
      folder: what `vhajax export` or save_pretrained wrote.
      python: an interpreter with torch and transformers.
    Raises:
      UserError: a folder or an interpreter that cannot be used.
    """
    cfg, params = load.read_model(folder)
    model = inference.decoder(cfg, params)
    size = sum(x.nbytes for x in sharding.named_arrays(model).values())
    assert layers.compute_dtype(cfg) == np.float32
    rival = Rival(python, folder)
    try:
        cases: dict[str, Callable[[], Any]] = {READ: read_case()}
        for batch in BATCHES:
            for what in ("prefill", "decode"):
                cases[f"ours {what} {batch}"] = _ours(model, what, batch)
                cases[f"theirs {what} {batch}"] = lambda w=what, b=batch: rival.seconds(w, b)
        times = interleaved(cases, rounds)
    finally:
        rival.close()
    bandwidth = 2**30 / times.pop(READ)
    return [_row(times, batch, size / bandwidth) for batch in BATCHES]


def _row(times: dict[str, float], batch: int, floor: float) -> Row:
    ours, theirs = times[f"ours decode {batch}"], times[f"theirs decode {batch}"]
    prompt, rival = times[f"ours prefill {batch}"], times[f"theirs prefill {batch}"]
    return {
        "batch": batch,
        "decode_tokens_per_s": round(NEW * batch / ours, 1),
        "transformers": round(NEW * batch / theirs, 1),
        "ratio": round(theirs / ours, 2),
        "floor_tokens_per_s": round(batch / floor, 1),
        "prefill_ms": round(1e3 * prompt, 1),
        "transformers_ms": round(1e3 * rival, 1),
        "prefill_ratio": round(rival / prompt, 2),
    }


def _ours(model: Transformer, what: str, batch: int) -> Callable[[], float]:
    """Seconds of one prefill, or of the steps after it."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, model.cfg.vocab_size, (batch, LENGTH)).astype(np.int32)
    keys = jax.vmap(jax.random.key)(np.arange(batch))

    def run() -> float:
        cache = decode.init_cache(model, batch, LENGTH + NEW)
        start = time.perf_counter()
        logits, cache = jax.block_until_ready(decode.prefill(model, tokens, cache))
        if what == "decode":
            start, shown = time.perf_counter(), None
            for _ in range(NEW):
                token, logits, cache = decode.sample_step(model, logits, cache, keys, GREEDY)
                shown = token if shown is None else (np.asarray(shown), token)[1]
            jax.block_until_ready(logits)
        return time.perf_counter() - start

    return run
