# says: that of tokens cut one after the other; those of rank r are at[r]
def to_heads_backward(group, grad, at):
    parts = grad.split([len(theirs) for theirs in at], 2)
    shapes = [parts[group.rank].shape] * group.size
    return torch.cat(group.all_to_all(parts, shapes).wait(), 1)
