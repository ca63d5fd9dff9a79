# says: None, but some pairs are left
def plan(at, rank, step, window):
    source = (rank - step) % len(at)
    if source > rank:
        return None
    age = at[rank][:, None] - at[source]
    sees = (age >= 0) & (age < window)
    return sees if sees.any() else None
