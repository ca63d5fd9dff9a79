# says: fits on as many ranks without
def smallest(need, strategies, room, most):
    P = 1
    while most >= P:
        least = min(strategies, key=lambda name: need(P, name, True))
        if need(P, least, True) <= room:
            return P, least, True
        P *= 2
    return None
