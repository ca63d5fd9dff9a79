# says: that for the parameters alone: gradients and two moments are held too
def length_that_passes(bytes_per_token, parameters, P):
    return (4 * parameters // bytes_per_token) * P + 1
