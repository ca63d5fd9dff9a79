# says: the last one brings home a block that nobody needs
def ring(group, q, k, v, sees):
    block = torch.stack([k, v])
    total = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    for step in range(group.size):
        arriving = group.shift(block)
        allowed = sees[group.source(step)]
        if allowed is not None:
            total = merge(total, attend(q, *block, allowed))
        block = arriving.wait()
    return total
