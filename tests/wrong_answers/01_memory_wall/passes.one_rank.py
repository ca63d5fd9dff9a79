# says: that of one rank: a rank has only ⌈S/P⌉ of the tokens
def length_that_passes(bytes_per_token, parameters, P):
    return 16 * parameters // bytes_per_token + 1
