# says: that of scores without 1/sqrt(D)
def partial(q, k, v, allowed):
    scores = (q @ k.mT).masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1)
    safe = lse.masked_fill(lse == -torch.inf, 0)
    return (scores - safe[..., None]).exp() @ v, lse
