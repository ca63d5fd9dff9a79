# says: one storage twice: two operations saved it
def saved_bytes(fn, parameters):
    found, owned = [], {p.untyped_storage().data_ptr() for p in parameters}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            found.append(storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = fn()
    del result
    return sum(found)
