# says: pairs whose key is later than the query
def tile(rank, step, ranks, L):
    source = (rank - step) % ranks
    if source == rank:
        return slice(None), slice(None), True
    if source < rank:
        return slice(None), slice(L // 2, None), False
    return slice(L // 2, None), slice(None), False
