# says: what this rank's keys add to it: the other ranks' keys count, too
def backward(q, k, v, out, lse, dO, at, group):
    delta = (dO * out).sum(-1)
    Q, DO, LSE, DELTA = (gathered(x, at, group) for x in (q, dO, lse, delta))
    scale = q.shape[-1] ** -0.5
    hidden = torch.cat(at)[:, None] < at[group.rank]
    p = (scale * Q @ k.mT - LSE[..., None]).exp().masked_fill(hidden, 0)
    ds = scale * p * (DO @ v.mT - DELTA[..., None])
    dq = (ds @ k).split([len(a) for a in at], 2)[group.rank]
    return dq, ds.mT @ Q, p.mT @ DO
