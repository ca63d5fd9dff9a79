# says: what comes without delta: the softmax of a row changes as a whole
def backward(q, k, v, out, lse, dO, at, group):
    Q, DO, LSE = (gathered(x, at, group) for x in (q, dO, lse))
    scale = q.shape[-1] ** -0.5
    hidden = torch.cat(at)[:, None] < at[group.rank]
    p = (scale * Q @ k.mT - LSE[..., None]).exp().masked_fill(hidden, 0)
    ds = scale * p * (DO @ v.mT)
    return scattered(ds @ k, at, group), ds.mT @ Q, p.mT @ DO
