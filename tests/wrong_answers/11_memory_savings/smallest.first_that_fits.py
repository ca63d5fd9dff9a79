# says: needs less
def smallest(need, strategies, room, most):
    P = 1
    while most >= P:
        for recompute in (False, True):
            for name in strategies:
                if need(P, name, recompute) <= room:
                    return P, name, recompute
        P *= 2
    return None
