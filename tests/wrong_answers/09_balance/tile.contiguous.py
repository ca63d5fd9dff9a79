# says: pairs too few
def tile(rank, step, ranks, L):
    source = (rank - step) % ranks
    if source > rank:
        return slice(0), slice(0), False
    return slice(None), slice(None) if source == rank else slice(L // 2), source == rank
