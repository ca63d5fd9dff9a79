# says: those of all S tokens; a rank has L of them
def activations(model, S, P, recompute):
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    layer = (2 * (4 * model.dim + 2 * q + 2 * kv + 3 * model.ffn_dim) + 4 * model.heads) * S
    return 2 * model.dim * S * model.layers + layer if recompute else layer * model.layers
