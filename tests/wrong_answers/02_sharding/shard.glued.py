# says: the parts one after the other, in the order of ranks
def shard(x, dim, P, r, dealt):
    return x.index_select(dim, dealt(x.shape[dim], P, r))


def unshard(parts, dim, dealt):
    return torch.cat(parts, dim)
