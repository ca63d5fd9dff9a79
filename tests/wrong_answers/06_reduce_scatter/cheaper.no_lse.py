# says: right but for the lse: H·Sq·4 bytes to each other rank
def most_queries(Skv, H, Hkv, D, e, P):
    return (2 * Skv * Hkv * D * e - 1) // (H * D * (e + 4))
