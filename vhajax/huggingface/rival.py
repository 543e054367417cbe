"""Times transformers on request; run by an interpreter with torch, apart from everything of ours.

    rival.py FOLDER NEW    then lines `prefill|decode SEED BATCH LENGTH` on stdin, seconds on stdout

Decoding is the shortest loop over the model and its cache, without what `generate` does around it.
"""

import sys
import time

import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]
from transformers.utils import logging  # pyright: ignore[reportMissingImports]


def main(folder: str, new: int) -> None:
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    print("ready", flush=True)
    for line in sys.stdin:
        what, *sizes = line.split()
        seed, batch, length = map(int, sizes)
        torch.manual_seed(seed)
        ids = torch.randint(2, model.config.vocab_size, (batch, length))
        with torch.inference_mode():
            start = time.perf_counter()
            out = model(ids, use_cache=True, logits_to_keep=1)
            if what == "decode":
                start = time.perf_counter()
                for _ in range(new):
                    token = out.logits[:, -1:].argmax(-1)
                    out = model(token, past_key_values=out.past_key_values, use_cache=True)
            print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
