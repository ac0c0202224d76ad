"""``scaled_dot_product_attention`` by its memory-efficient kernel, and by no other; there is none for the CPU."""

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def build(num_heads, head_dim, num_pivots):
    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return scaled_dot_product_attention(q, k, v)

    return attend
