# says: that of a mask for keys in the order of the sequence: they arrive rank by rank
def forward(q, k, v, at, group):
    K, V = (gathered(x, at, group) for x in (k, v))
    K, V = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (K, V))
    return attend(q, K, V, at[group.rank][:, None] >= torch.arange(K.shape[2]))
