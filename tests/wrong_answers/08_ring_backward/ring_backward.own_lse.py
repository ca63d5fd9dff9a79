# says: that of each tile's own lse: use the final one
def ring_backward(group, q, k, v, out, lse, dO, sees):
    delta, dq = (dO * out).sum(-1), torch.zeros_like(q)
    block, behind = torch.stack([k, v]), None
    for step in range(group.size):
        last = step == group.size - 1
        if not last:
            arriving = group.shift(block)
        allowed = sees[group.source(step)]
        if allowed is not None:
            K = block[0].repeat_interleave(q.shape[1] // k.shape[1], 1)
            scores = (q @ K.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf)
            lse = scores.logsumexp(-1)
        dq_here, *dkv = autograd_tile(q, *block, dO, lse, delta, allowed)
        dq += dq_here
        sums = torch.stack(dkv)
        if behind:
            sums += behind.wait()
        behind = group.shift(sums)
        if not last:
            block = arriving.wait()
    return dq, *behind.wait()
