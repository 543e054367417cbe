"""The baseline of `make train`: a Qwen3-style block with grouped-query attention, four KV heads."""

from vhajax.config import GQA, Data, Experiment, Model, Optim, Train

EXPERIMENT = Experiment(
    model=Model(
        vocab_size=4096,
        dim=256,
        num_layers=4,
        attention=GQA(num_heads=8, num_kv_heads=4, head_dim=32),
        ffn_dim=768,
    ),
    data=Data(seq_len=256, batch_size=8),
    optim=Optim(warmup_steps=10),
    train=Train(steps=180, eval_every=90, eval_rows=80, checkpoint_every=90),
)
