# says: the last S mod 2P tokens belong to nobody
def positions(S, P, r):
    size = S // (2 * P)
    late = (2 * P - 1 - r) * size
    return torch.cat([torch.arange(r * size, (r + 1) * size), torch.arange(late, late + size)])
