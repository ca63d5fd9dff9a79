# says: short of the one layer that is computed again
def activations(model, S, P, recompute):
    L = ceil(S / P)
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    layer = (2 * (4 * model.dim + 2 * q + 2 * kv + 3 * model.ffn_dim) + 4 * model.heads) * L
    return 2 * model.dim * L * model.layers if recompute else layer * model.layers
