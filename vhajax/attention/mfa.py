"""Multi-matrix Factorization Attention (arXiv 2412.19255): low-rank queries, one wide KV head."""

from vhajax.attention.gqa import GQAttention


class MFAttention(GQAttention):
    """MQA whose queries pass through a latent that all heads share.

    query_latent [D, C_q] with an RMSNorm, query [C_q, N, H], key [D, 1, H], value [D, 1, H_v]. The
    queries cost C_q·(D + N·H) parameters instead of D·N·H, which buys more and wider heads; the
    cache holds 2·H. (Section 3; the base class builds the latent from `query_latent_dim`.)
    """
