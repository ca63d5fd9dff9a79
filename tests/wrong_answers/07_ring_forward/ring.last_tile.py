# says: without the block that arrives last: it is never looked at
def ring(group, q, k, v, sees):
    block = torch.stack([k, v])
    total = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    for step in range(group.size - 1):
        arriving = group.shift(block)
        allowed = sees[group.source(step)]
        if allowed is not None:
            total = merge(total, attend(q, *block, allowed))
        block = arriving.wait()
    return total
