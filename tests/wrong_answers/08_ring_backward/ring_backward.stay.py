# says: the own tile's share alone: do dK,dV travel?
def ring_backward(group, q, k, v, out, lse, dO, sees):
    delta, dq = (dO * out).sum(-1), torch.zeros_like(q)
    block, own = torch.stack([k, v]), None
    for step in range(group.size):
        last = step == group.size - 1
        if not last:
            arriving = group.shift(block)
        allowed = sees[group.source(step)]
        dq_here, *dkv = autograd_tile(q, *block, dO, lse, delta, allowed)
        dq += dq_here
        own = own or dkv
        if not last:
            block = arriving.wait()
    return dq, *own
