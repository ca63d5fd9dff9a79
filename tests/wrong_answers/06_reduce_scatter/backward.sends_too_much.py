# says: dk and dv are complete where the keys are
def backward(q, k, v, out, lse, dO, at, group):
    Q, K, V, OUT, LSE, DO = (gathered(x, at, group) for x in (q, k, v, out, lse, dO))
    order, scale = torch.cat(at), q.shape[-1] ** -0.5
    p = (scale * Q @ K.mT - LSE[..., None]).exp().masked_fill(order[:, None] < order, 0)
    ds = scale * p * (DO @ V.mT - (DO * OUT).sum(-1, keepdim=True))
    lengths = [len(a) for a in at]
    return [x.split(lengths, 2)[group.rank] for x in (ds @ K, ds.mT @ Q, p.mT @ DO)]
