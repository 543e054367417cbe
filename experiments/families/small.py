"""The recipe of `make compare`: small enough for two CPU cores, shared by `small_*.py`.

Every mechanism reads the same batches; `ffn_dim` makes up for what attention saves, so that all
have nearly as many parameters as MHA.
"""

from vhajax.config import Attention, Data, Experiment, Model, Optim, Train


def small(attention: Attention, ffn_dim: int) -> Experiment:
    return Experiment(
        model=Model(vocab_size=4096, dim=128, num_layers=3, attention=attention, ffn_dim=ffn_dim),
        data=Data(seq_len=256, batch_size=8),
        optim=Optim(warmup_steps=10),
        train=Train(steps=110, eval_every=0, checkpoint_every=55),
    )
