# says: P blocks large; a ring never holds all of them
def buffers(strategy, L, P, heads, kv_heads, head_dim):
    Q, K = heads * L * head_dim, 2 * kv_heads * L * head_dim
    return 4 * (Q + K) + 6 * P * K
