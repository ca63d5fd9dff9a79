# says: that of the keys of rank r + i: at step i those of rank r - i are here
def plan(at, rank, step, window):
    source = (rank + step) % len(at)
    age = at[rank][:, None] - at[source]
    sees = (age >= 0) & (age < window)
    return sees if sees.any() else None
