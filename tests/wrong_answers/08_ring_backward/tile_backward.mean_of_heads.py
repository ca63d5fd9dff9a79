# says: the mean over the query heads of a group, not the sum
def tile_backward(q, k, v, dO, lse, delta, sees):
    times = q.shape[1] // k.shape[1]
    K, V = (x.repeat_interleave(times, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    p = (scale * q @ K.mT - lse[..., None]).exp().masked_fill(~sees, 0)
    ds = scale * p * (dO @ V.mT - delta[..., None])
    dk, dv = (x.unflatten(1, (-1, times)).mean(2) for x in (ds.mT @ q, p.mT @ dO))
    return ds @ K, dk, dv
