# says: that of stale K,V: every step uses the own block
def ring_backward(group, q, k, v, out, lse, dO, sees):
    delta, dq = (dO * out).sum(-1), torch.zeros_like(q)
    block, behind = torch.stack([k, v]), None
    for step in range(group.size):
        last = step == group.size - 1
        if not last:
            arriving = group.shift(block)
        allowed = sees[group.source(step)]
        dq_here, *dkv = autograd_tile(q, k, v, dO, lse, delta, allowed)
        dq += dq_here
        sums = torch.stack(dkv)
        if behind:
            sums += behind.wait()
        behind = group.shift(sums)
        if not last:
            block = arriving.wait()
    return dq, *behind.wait()
