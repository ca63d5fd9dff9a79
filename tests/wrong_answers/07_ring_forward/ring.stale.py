# says: that of the own block at every step: is the block that came in used?
def ring(group, q, k, v, sees):
    block = torch.stack([k, v])
    total = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    for step in range(group.size):
        last = step == group.size - 1
        if not last:
            arriving = group.shift(block)
        allowed = sees[group.source(step)]
        if allowed is not None:
            total = merge(total, attend(q, k, v, allowed))
        if not last:
            block = arriving.wait()
    return total
