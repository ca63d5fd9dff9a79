# says: it takes the inverse of that order
def shard(x, dim, P, r, dealt):
    return x.index_select(dim, dealt(x.shape[dim], P, r))


def unshard(parts, dim, dealt):
    S, P = sum(part.shape[dim] for part in parts), len(parts)
    order = torch.cat([dealt(S, P, r) for r in range(P)])
    return torch.cat(parts, dim).index_select(dim, order)
