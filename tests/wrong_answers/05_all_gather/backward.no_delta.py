# says: what comes without delta: the softmax of a row changes as a whole
def backward(q, k, v, out, lse, dO, at, group):
    K, V = (gathered(x, at, group) for x in (k, v))
    times, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    K, V = (x.repeat_interleave(times, 1) for x in (K, V))
    hidden = at[group.rank][:, None] < torch.cat(at)
    p = (scale * q @ K.mT - lse[..., None]).exp().masked_fill(hidden, 0)
    ds = scale * p * (dO @ V.mT)
    dk, dv = (x.unflatten(1, (-1, times)).sum(2) for x in (ds.mT @ q, p.mT @ dO))
    return ds @ K, scattered(dk, at, group), scattered(dv, at, group)
