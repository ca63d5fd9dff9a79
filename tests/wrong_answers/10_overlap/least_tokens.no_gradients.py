# says: without the gradients, which travel beside the block
def least_tokens(F, W, e, heads, kv_heads, causal=False, backward=False):
    forward = e * kv_heads * F / (2 * heads * W) * (2 if causal else 1)
    return forward / 2.5 if backward else forward
