"""Small models of every mechanism and position, with options that cover every pair of choices."""

import itertools

from vhajax.config import GQA, LRKV, MFA, MLA, VHA, Model
from vhajax.mechanisms import NORMS, RopeScaling

V = 50
# Wavelengths of theta 100 lie around 16: some stay, some are stretched, some lie between.
SCALINGS = (
    RopeScaling(),
    RopeScaling(kind="llama3", factor=4.0, original_length=64),
    RopeScaling(kind="yarn", factor=4.0, original_length=32, beta_fast=4.0),
)
VARIANTS = {  # no number of heads equals T, D or a head dim; sizes of heads are spread over them
    "gqa": lambda **o: GQA(num_heads=4, num_kv_heads=2, head_dim=40, **o),
    "mqa": lambda **o: GQA(num_heads=3, num_kv_heads=1, head_dim=80, **o),
    "mla": lambda **o: MLA(num_heads=3, head_dim=16, latent_dim=24, rope_dim=10, **o),
    "mla full": lambda **o: MLA(num_heads=3, head_dim=40, latent_dim=20, position="full", **o),
    "mla none": lambda **o: MLA(num_heads=3, head_dim=21, latent_dim=20, position="none", **o),
    "mfa": lambda **o: MFA(num_heads=5, head_dim=192, query_latent_dim=12, **o),
    "vha": lambda **o: VHA(num_physical_heads=3, num_kv_heads=2, head_dim=64, **o),
    "narrow vha": lambda **o: VHA(
        num_physical_heads=2, num_kv_heads=3, head_dim=128, query_dim=6, postmix_rank=0, **o
    ),
    "plain vha": lambda **o: VHA(
        num_physical_heads=6, num_kv_heads=2, head_dim=16, premix=False, postmix_rank=2, **o
    ),
    "lrkv": lambda **o: LRKV(num_heads=3, head_dim=16, rank=5, **o),
    "lrkv shared": lambda **o: LRKV(num_heads=3, head_dim=40, rank=6, position="shared", **o),
    "lrkv none": lambda **o: LRKV(num_heads=5, head_dim=15, rank=3, position="none", **o),
}
SWITCHES = ("wide", "windows", "cap", "qkv_bias", "out_bias", "gate")


# On or off in row 0, one string a variant; row 1 has the opposite.
PATTERNS = [
    "110001",
    "110101",
    "000101",
    "100001",
    "111110",
    "110011",
    "100110",
    "111101",
    "101101",
    "011011",
    "010001",
    "100100",
]


def options(name: str, row: int) -> dict:
    """What one row of a variant chooses."""
    variant = list(VARIANTS).index(name)
    on = [(mark == "1") ^ (row == 1) for mark in PATTERNS[variant]]
    chosen: dict = dict(zip(SWITCHES, on, strict=True))
    chosen["qk_norm"] = ("none", "weightless")[variant % 2] if row else "weighted"
    chosen["scaling"] = 0 if name.endswith("none") else (variant + variant // 4) % 3
    if "mla" in name or name == "mfa":
        chosen["latent_norm"] = NORMS[(variant + row) % 3]
    if "mla" in name:
        chosen["query_latent"] = row == 0
    return chosen


def model(name: str, row: int = 0, **more) -> Model:
    """Two layers of a variant with its row of options."""
    chosen = options(name, row)
    fields = {
        "value_dim": 24 * chosen["wide"],
        "qk_norm": chosen["qk_norm"],
        "rope_theta": 100.0,
        "rope_scaling": SCALINGS[chosen["scaling"]],
        "qkv_bias": chosen["qkv_bias"],
        "out_bias": chosen["out_bias"],
        "logit_cap": 2.5 * chosen["cap"],
        "output_gate": chosen["gate"],
    }
    if "latent_norm" in chosen:
        fields["latent_norm"] = chosen["latent_norm"]
    if "query_latent" in chosen:
        fields["query_latent_dim"] = 12 * chosen["query_latent"]
    size = {"vocab_size": V, "vocab_multiple": 64, "dim": 32, "num_layers": 2, "ffn_dim": 40}
    size |= {"windows": (3, 0) if chosen["windows"] else (), "norm_eps": 1e-3}
    return Model(attention=VARIANTS[name](**fields), **size | more)


ROWS = list(itertools.product(VARIANTS, range(2)))
