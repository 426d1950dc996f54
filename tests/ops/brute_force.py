"""NSA by loops, straight from the specification: one query, one head, one key at a time, in float64.

Independent of the package: no formula is shared with it. Tensors come in as the operators take them.
"""

import math

import torch


def softmax_read(q, keys, values):
    """q [D], keys [[D]], values [[E]] -> (o [E], lse)."""
    scale = 1.0 / math.sqrt(len(q))
    scores = [sum(a * b for a, b in zip(q, k, strict=True)) * scale for k in keys]
    if not scores:
        return None, -math.inf
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    total = sum(weights)
    size = len(values[0])
    o = [sum(w * v[e] for w, v in zip(weights, values, strict=True)) / total for e in range(size)]
    return o, top + math.log(total)


def documents(tokens, cu_seqlens):
    if cu_seqlens is None:
        return [(0, tokens)]
    borders = cu_seqlens.tolist()
    return [(borders[i], borders[i + 1]) for i in range(len(borders) - 1)]


def count_compressed(length, spec):
    count = 0
    while count * spec.cmp_stride + spec.cmp_block <= length:
        count += 1
    return count


def _walk(q, spec, cu_seqlens):
    """Yields (batch, head, group-free token index, position, document start, first compressed slot)."""
    slot = 0
    for start, end in documents(q.shape[1], cu_seqlens):
        for token in range(start, end):
            for b in range(q.shape[0]):
                for head in range(q.shape[2]):
                    yield b, head, token, token - start, start, slot
        slot += count_compressed(end - start, spec)


def _visible_compressed(position, spec):
    i = 0
    while i * spec.cmp_stride + spec.cmp_block - 1 <= position:
        i += 1
    return i


def compressed(q, k, v, spec, cu_seqlens=None):
    per_group = q.shape[2] // k.shape[2]
    o = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    for b, head, token, position, _, slot in _walk(q, spec, cu_seqlens):
        g = head // per_group
        seen = range(slot, slot + _visible_compressed(position, spec))
        read, value = softmax_read(
            q[b, token, head].tolist(), [k[b, i, g].tolist() for i in seen], [v[b, i, g].tolist() for i in seen]
        )
        if read is not None:
            o[b, token, head] = torch.tensor(read, dtype=torch.float64)
            lse[b, token, head] = value
    return o, lse


def block_scores(q, k, spec, cu_seqlens=None):
    """{(b, token, g): [score of each visible block]}: Eq. 9 per head, summed over the group (Eq. 10)."""
    groups = k.shape[2]
    per_group = q.shape[2] // groups
    scores = {}
    for b, head, token, position, _, slot in _walk(q, spec, cu_seqlens):
        g = head // per_group
        visible = _visible_compressed(position, spec)
        scale = 1.0 / math.sqrt(q.shape[3])
        logits = [
            sum(x * y for x, y in zip(q[b, token, head].tolist(), k[b, slot + i, g].tolist(), strict=True)) * scale
            for i in range(visible)
        ]
        top = max(logits, default=0.0)
        total = sum(math.exp(x - top) for x in logits)
        p = [math.exp(x - top) / total for x in logits]
        blocks = position // spec.sel_block + 1
        row = scores.setdefault((b, token, g), [0.0] * blocks)
        for j in range(blocks):
            for i in range(visible):
                row[j] += p[i] * _shared_chunks(i, j, spec)
    return scores


def _shared_chunks(i, j, spec):
    """Stride-sized chunks that compressed block i and selection block j have in common."""
    of_cmp = {i + n for n in range(spec.cmp_block // spec.cmp_stride)}
    per_block = spec.sel_block // spec.cmp_stride
    return len(of_cmp & {j * per_block + n for n in range(per_block)})


def select(q, k, spec, cu_seqlens=None):
    groups = k.shape[2]
    indices = torch.full((q.shape[0], q.shape[1], groups, spec.num_selected), -1, dtype=torch.int32)
    for (b, token, g), row in block_scores(q, k, spec, cu_seqlens).items():
        chosen = pick(row, spec)
        indices[b, token, g, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return indices


def pick(row, spec):
    blocks = len(row)
    forced = {j for j in range(blocks) if j < spec.num_init or j >= blocks - spec.num_local}
    rest = sorted((j for j in range(blocks) if j not in forced), key=lambda j: (-row[j], j))
    return sorted([*forced, *rest[: spec.num_selected - len(forced)]])


def selected(q, k, v, indices, spec, cu_seqlens=None):
    def keys_of(b, token, position, start, g):
        blocks = {j for j in indices[b, token, g].tolist() if j >= 0}
        return [start + s for s in range(position + 1) if s // spec.sel_block in blocks]

    return _token_attention(q, k, v, spec, cu_seqlens, keys_of)


def window(q, k, v, spec, cu_seqlens=None):
    def keys_of(b, token, position, start, g):
        return [start + s for s in range(position + 1) if position - spec.window < s]

    return _token_attention(q, k, v, spec, cu_seqlens, keys_of)


def _token_attention(q, k, v, spec, cu_seqlens, keys_of):
    per_group = q.shape[2] // k.shape[2]
    o = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b, head, token, position, start, _ in _walk(q, spec, cu_seqlens):
        g = head // per_group
        keys = keys_of(b, token, position, start, g)
        read, _ = softmax_read(
            q[b, token, head].tolist(), [k[b, s, g].tolist() for s in keys], [v[b, s, g].tolist() for s in keys]
        )
        if read is not None:
            o[b, token, head] = torch.tensor(read, dtype=torch.float64)
    return o
