"""placeholder until the op's branch is merged"""

import torch

TILE = 4 << 20


def kron_variance_(variance, inputs, outputs, eigenvalues_in, eigenvalues_out, precision, scale=1.0):
    if inputs is not None and inputs.shape[1] == 1:
        rows = outputs[:, :, 0]  # (K, N, G, b)
        squares = inputs[:, 0].square().transpose(0, 1)  # (G, N, a)
        d = 1 / (scale * eigenvalues_in[:, :, None] * eigenvalues_out[:, None] + precision)
        w = torch.bmm(squares, d.to(squares.dtype)).transpose(0, 1)  # (N, G, b)
        right = rows.permute(1, 0, 2, 3).flatten(2)
        left = right * w.flatten(1)[:, None]
        variance += (left * right).sum(2) if variance.dim() == 2 else left @ right.mT
        return variance
    root = (scale * eigenvalues_in[:, :, None] * eigenvalues_out[:, None] + precision).rsqrt()
    k, n = outputs.shape[:2]
    groups, a, b = root.shape
    root = root.to(outputs.dtype)
    step = max(TILE // (k * groups * a * b * outputs.element_size()), 1)
    for begin in range(0, n, step):
        some = slice(begin, begin + step)
        if inputs is None:
            m = outputs[:, some].transpose(0, 1) * root
        else:
            left = inputs[some].permute(0, 2, 3, 1)  # (n, G, a, T)
            right = outputs[:, some].permute(1, 3, 2, 0, 4)  # (n, G, T, K, b)
            count, t = left.shape[0], left.shape[3]
            m = torch.bmm(left.reshape(-1, a, t), right.reshape(count * groups, t, k * b)).view(count, groups, a, k, b)
            m = (m * root[:, :, None]).permute(0, 3, 1, 2, 4)
        rows = m.reshape(m.shape[0], k, -1)
        variance[some] += rows.square().sum(2) if variance.dim() == 2 else torch.bmm(rows, rows.mT)
    return variance
