"""The VHA authors' dense sizes and recipe (PaddleFleet, Research/VHA), shared by `vha_*.py`.

Shapes are Qwen3's; only attention differs between a VHA and its GQA baseline. Our reading, where
the authors state nothing: AdamW's ε of 1e-8, eight devices, and how a batch is accumulated. Their
weight decay may also act on the tied embedding; ours acts on matrices inside blocks.
"""

from vhajax.config import GQA, VHA, Attention, Data, Experiment, Mesh, Model, Optim, Train

H = 128
SEQ_LEN = 4096
STEPS = 24_000
ROWS = 512  # nearest power of two to 50B tokens / (24,000 steps · 4,096)


def gqa(num_heads: int) -> GQA:
    return GQA(num_heads=num_heads, num_kv_heads=8, head_dim=H, rope_theta=1e6)


def vha(num_physical_heads: int) -> VHA:
    """Half of the baseline's query heads; Postmix of rank N/4."""
    return VHA(num_physical_heads=num_physical_heads, num_kv_heads=2, head_dim=H, rope_theta=1e6)


def size_0b6(attention: Attention) -> Experiment:
    return _experiment(attention, dim=1024, num_layers=28, ffn_dim=3072)


def size_1b7(attention: Attention) -> Experiment:
    return _experiment(attention, dim=2048, num_layers=28, ffn_dim=6144)


def size_4b(attention: Attention) -> Experiment:
    return _experiment(attention, dim=2560, num_layers=36, ffn_dim=9728)


def _experiment(attention: Attention, dim: int, num_layers: int, ffn_dim: int) -> Experiment:
    return Experiment(
        model=Model(
            vocab_size=151_936,
            dim=dim,
            num_layers=num_layers,
            attention=attention,
            ffn="swiglu",
            ffn_dim=ffn_dim,
            norm="weighted",
            norm_eps=1e-6,
            tied=True,
            dtype="bfloat16",
        ),
        data=Data(path="data/fineweb_edu_qwen3_t4096", seq_len=SEQ_LEN, batch_size=ROWS),
        optim=Optim(
            name="adamw",
            matrix_lr=2e-4,
            embedding_lr=2e-4,
            unembedding_lr=2e-4,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            clip_norm=1.0,
            warmup_steps=2000,
            final_fraction=0.05,  # 1e-5
        ),
        train=Train(
            steps=STEPS,
            grad_accum=32,  # two rows a device at a time
            eval_every=1000,
            eval_rows=1024,
            checkpoint_every=1000,
        ),
        mesh=Mesh(data=8),
    )
