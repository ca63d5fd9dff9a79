# says: they come from rank r - i
def tile(rank, step, ranks, L):
    source = (rank + step) % ranks
    if source == rank:
        return slice(None), slice(None), True
    if source < rank:
        return slice(None), slice(L // 2), False
    return slice(L // 2, None), slice(None), False
