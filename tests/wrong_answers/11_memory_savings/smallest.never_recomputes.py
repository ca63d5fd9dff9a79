# says: ranks are more than it takes
def smallest(need, strategies, room, most):
    P = 1
    while most >= P:
        least = min(strategies, key=lambda name: need(P, name, False))
        if need(P, least, False) <= room:
            return P, least, False
        P *= 2
    return None
