# says: as if all query heads travelled; the block has Hkv heads
def least_tokens(F, W, e, heads, kv_heads, causal=False, backward=False):
    return e * F / (2 * W)
