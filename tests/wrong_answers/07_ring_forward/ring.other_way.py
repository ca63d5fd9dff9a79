# says: that of masks of rank r + i: at step i the block of rank r - i is here
def ring(group, q, k, v, sees):
    block = torch.stack([k, v])
    total = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    for step in range(group.size):
        last = step == group.size - 1
        if not last:
            arriving = group.shift(block)
        allowed = sees[(group.rank + step) % group.size]
        if allowed is not None:
            total = merge(total, attend(q, *block, allowed))
        if not last:
            block = arriving.wait()
    return total
