# says: short of the gradients of the gathered K and V
def buffers(strategy, L, P, heads, kv_heads, head_dim):
    Q, K = heads * L * head_dim, 2 * kv_heads * L * head_dim
    others = {"ring": 16 * K, "all_gather": 2 * P * K, "ulysses": 4 * Q + 2 * K}
    return 4 * (Q + K) + others[strategy]
