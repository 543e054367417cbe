"""The LRKV paper's sizes and recipe (arXiv 2601.11471v3, Tables 5 to 7), shared by `lrkv_*.py`.

The paper states heads, head dim 128, ranks, KV heads of GQA and latent widths of MLA, and that all
else follows nanochat: width 128·N, a ReLU² MLP of four widths, norms without weights, QK-norm,
untied embeddings, no biases. Our reading, where it states nothing or contradicts itself:

- Vocabulary 50,257, padded to nanochat's default of 50,304: with it, parameters of MHA come
  nearest to the labels.
- Layers. 128M: 12, as 72 MB of MHA cache in Table 12 say; nanochat, too, has two layers a head.
  1.2B: 36, 1.17B parameters; the 24 of Table 5, which it shares with the 512M model, make 0.83B.
  2.5B: 36, 2.52B parameters; so do 648 MB in Table 12 and figures 7, 8 and 14, while the 18 of
  Table 5 make 1.38B. 6.3B: 29, 6.25B parameters; the 36 that 1,152 MB in Table 12 need make 7.66B.
- MLA is one joint latent without a norm of its own; keys are rotated after the up-projection.
- The cosine ends at 0 and AdamW has nanochat's β₁ of 0.8.
"""

from vhajax.config import GQA, LRKV, MLA, Attention, Data, Experiment, Mesh, Model, Optim, Train

H = 128
TOKENS_A_STEP = 32_768


def gqa(num_heads: int, num_kv_heads: int) -> GQA:
    return GQA(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=H, qk_norm="weightless")


def mla(num_heads: int, latent_dim: int) -> MLA:
    return MLA(
        num_heads=num_heads,
        latent_dim=latent_dim,
        head_dim=H,
        position="full",
        latent_norm="none",
        qk_norm="weightless",
    )


def lrkv(num_heads: int, rank: int) -> LRKV:
    return LRKV(num_heads=num_heads, rank=rank, head_dim=H, qk_norm="weightless")


def size_128m(attention: Attention) -> Experiment:
    return _experiment(attention, num_layers=12, tokens=100e9, grad_accum=1)


def size_1b2(attention: Attention) -> Experiment:
    return _experiment(attention, num_layers=36, tokens=50e9, grad_accum=2)


def size_2b5(attention: Attention) -> Experiment:
    return _experiment(attention, num_layers=36, tokens=50e9, grad_accum=2)


def size_6b3(attention: Attention) -> Experiment:
    return _experiment(attention, num_layers=29, tokens=50e9, grad_accum=2)


def _experiment(
    attention: Attention, num_layers: int, tokens: float, grad_accum: int
) -> Experiment:
    D, seq_len = H * attention.num_heads, 2048
    return Experiment(
        model=Model(
            vocab_size=50_257,
            dim=D,
            num_layers=num_layers,
            attention=attention,
            ffn="relu2",
            ffn_dim=4 * D,
            norm="weightless",
            dtype="bfloat16",
        ),
        data=Data(
            path="data/fineweb_edu_gpt2_t2048",
            seq_len=seq_len,
            batch_size=TOKENS_A_STEP // seq_len,
        ),
        optim=Optim(
            matrix_lr=0.02,
            embedding_lr=0.2,
            unembedding_lr=0.004,
            beta1=0.8,
            weight_decay=0.1,
            clip_norm=1.0,
            warmup_steps=2000,
            final_fraction=0.0,
        ),
        train=Train(
            steps=round(tokens / TOKENS_A_STEP),
            grad_accum=grad_accum,
            eval_every=10_000,
            eval_rows=1024,
            checkpoint_every=10_000,
            log_every=100,
        ),
        mesh=Mesh(data=8),  # the paper's 8 H200
    )
