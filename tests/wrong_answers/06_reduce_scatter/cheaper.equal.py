# says: one too many: there both send the same
def most_queries(Skv, H, Hkv, D, e, P):
    return 2 * Skv * Hkv * D * e // (H * (D * (e + 4) + 4 * P))
