"""SOAP: Adam run in the coordinates in which the gradient's second moments are nearly diagonal.

Adam divides each entry by the root of its mean square, as if entries were independent. Shampoo's two Gram averages
L = mean of G G^T and R = mean of G^T G say which combinations of rows and of columns are. SOAP rotates into their
eigenvectors, does Adam there, and rotates back:

    G' = QL^T G QR           M <- b1 M + (1 - b1) G          V <- b2 V + (1 - b2) G'^2
    N  = QL [ (QL^T M QR) / (sqrt(V) + eps) ] QR^T
    W <- W - lr sqrt(1 - b2^t) / (1 - b1^t) N;               W <- (1 - lr wd) W

Order matters. The first gradient only sets up the bases. Later ones enter L and R after the update, so that no
gradient is measured in its own basis. Every `refresh_every` updates one power iteration with QR renews the bases; V
lives in those coordinates, so when columns of Q are reordered, V is reordered with them. M stays unrotated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nanosprint.ops.tracing import not_traced
from nanosprint.optim.adam import adamw_, check_adam, init_adam_state
from nanosprint.optim.dtensor import local, local_like, scatter, whole
from nanosprint.optim.shell import Shell, check_unit, number, state_dtype

MAX_SIDE = 10_000  # a longer side keeps its own coordinates: its Gram matrix would take 400 MB and more
SIDES = (("gram_left", "basis_left"), ("gram_right", "basis_right"))


def soap_(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Any],
    *,
    lr: float | Tensor,
    betas: tuple[float, float] = (0.95, 0.95),
    gram_beta: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    refresh_every: int = 10,
) -> None:
    """One SOAP update of a matrix; without bases in `state`, set them up from `grad` and leave `param` alone.

    param, grad: (m, n), any float dtype; param is updated in place. state, made by `init_soap_state` and updated in
    place, in fp32 or wider: step (updates done, on the CPU), exp_avg M and exp_avg_sq V (m, n); for each side of at
    most `MAX_SIDE`, gram_left L and basis_left QL (m, m), gram_right R and basis_right QR (n, n). Products run without
    TF32. Source: Vyas et al. 2024, arXiv:2409.11321.
    """
    direction = soap_direction_(grad, state, betas, gram_beta, eps, refresh_every)
    if direction is not None:
        apply_(param, direction, lr, weight_decay)


def soap_direction_(
    grad: Tensor,
    state: dict[str, Any],
    betas: tuple[float, float],
    gram_beta: float,
    eps: float,
    refresh_every: int,
) -> Tensor | None:
    """Advance everything in `state` by grad (m, n). Returns N with its bias corrections; None on the first call."""
    grad = grad.to(state["exp_avg"].dtype)
    with fp32_products(tf32=False):
        if not any(basis in state for _, basis in SIDES):
            start_bases_(state, grad, gram_beta)
            return None
        direction = rotate_back(adam_direction_(rotate(grad, state), grad, state, betas, eps), state)
        update_grams_(state, grad, gram_beta)
        if int(state["step"]) % refresh_every == 0:
            refresh_bases_(state)
    return direction


def adam_direction_(
    rotated: Tensor, grad: Tensor, state: dict[str, Any], betas: tuple[float, float], eps: float
) -> Tensor:
    """Advance step, M (by grad) and V (by the rotated gradient); returns Adam's direction in rotated coordinates."""
    beta1, beta2 = betas
    state["step"] += 1
    step = int(state["step"])
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
    correction = (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    return rotate(state["exp_avg"], state).mul_(correction).div_(state["exp_avg_sq"].sqrt().add_(eps))


def apply_(param: Tensor, direction: Tensor, lr: Any, weight_decay: float) -> None:
    """param <- (1 - lr weight_decay) (param - lr direction), in the direction's dtype, rounded once, in place."""
    weight = param.to(direction.dtype) - lr * direction
    param.copy_(weight * (1 - lr * weight_decay) if weight_decay else weight)


def rotate(X: Tensor, state: dict[str, Any]) -> Tensor:
    """QL^T X QR; a side without basis stays as it is."""
    X = state["basis_left"].mT @ X if "basis_left" in state else X
    return X @ state["basis_right"] if "basis_right" in state else X


def rotate_back(X: Tensor, state: dict[str, Any]) -> Tensor:
    """QL X QR^T, the inverse of `rotate`."""
    X = state["basis_left"] @ X if "basis_left" in state else X
    return X @ state["basis_right"].mT if "basis_right" in state else X


def update_grams_(state: dict[str, Any], grad: Tensor, beta: float) -> None:
    """L <- beta L + (1 - beta) G G^T and R <- beta R + (1 - beta) G^T G, in place, for the sides there are.

    grad: (m, n), or (k, m, n) where the state is that of k matrices.
    """
    add = torch.addmm if grad.ndim == 2 else torch.baddbmm
    for (gram, _), G in zip(SIDES, (grad, grad.mT), strict=True):
        if gram in state:
            add(state[gram], G, G.mT, beta=beta, alpha=1 - beta, out=state[gram])


def start_bases_(state: dict[str, Any], grad: Tensor, beta: float) -> None:
    """The first Gram averages and their eigenvectors."""
    update_grams_(state, grad, beta)
    for gram, basis in SIDES:
        if gram in state:
            state[basis] = eigenbasis(state[gram])


def refresh_bases_(state: dict[str, Any]) -> None:
    """One power iteration per side: sort columns by their present eigenvalue estimate, then QR of L Q."""
    for axis, (gram, basis) in enumerate(SIDES):
        if gram not in state:
            continue
        product = state[gram] @ state[basis]
        order = (state[basis] * product).sum(0).argsort(descending=True, stable=True)  # of diag(Q^T L Q)
        state["exp_avg_sq"] = state["exp_avg_sq"].index_select(axis, order)
        state[basis] = torch.linalg.qr(product[:, order]).Q.contiguous()


def eigenbasis(gram: Tensor) -> Tensor:
    """Eigenvectors of a symmetric (m, m) matrix as columns, largest eigenvalue first, in its dtype.

    Where the solver fails in fp32 (ill-conditioned matrices), the answer comes from fp64.
    """
    shift = 1e-30 * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    try:
        vectors = torch.linalg.eigh(gram + shift).eigenvectors
    except torch.linalg.LinAlgError:
        vectors = torch.linalg.eigh((gram + shift).double()).eigenvectors.to(gram.dtype)
    return vectors.flip(-1).contiguous()


def init_soap_state(param: Tensor, state: dict[str, Any], max_side: int = MAX_SIDE) -> None:
    """Zero averages and Gram matrices for a parameter flattened to (first, rest)."""
    dtype, device = state_dtype(param), param.device
    rows, cols = matrix_sides(param)
    state["step"] = torch.zeros((), dtype=torch.float32)
    state["exp_avg"] = torch.zeros(rows, cols, dtype=dtype, device=device)
    state["exp_avg_sq"] = torch.zeros(rows, cols, dtype=dtype, device=device)
    for (gram, _), side in zip(SIDES, (rows, cols), strict=True):
        if side <= max_side:
            state[gram] = torch.zeros(side, side, dtype=dtype, device=device)


@contextmanager
def fp32_products(tf32: bool) -> Iterator[None]:
    """CUDA's products of fp32 matrices run in TF32, or in fp32 itself, inside; a setting of torch's, put back after.

    TF32 has ten bits of mantissa, which would spoil the orthogonality of bases, but holds every bf16 number exactly.
    """
    matmul = torch.backends.cuda.matmul
    if (matmul.fp32_precision == "tf32") == tf32:
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set through torch's newer interface, which must not be mixed with the older
        newer = matmul.fp32_precision
        matmul.fp32_precision = "tf32" if tf32 else "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = newer
        return
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class SOAP(Shell):
    """Adam in Shampoo's eigenbasis, for the matrices of hidden layers; see the module for the rule.

    params: tensors, named tensors or groups; options may be set per group and changed between steps. lr: a float or a
    0-D tensor. gram_beta: averaging of the Gram matrices, None for betas[1]. refresh_every: updates between two
    renewals of the bases. max_side: longer sides are not rotated. More than two axes are flattened to (first, rest).
    Tensors of fewer than two axes, and matrices with both sides too long, get plain Adam from their first gradient
    on, with eps and decay as above; a matrix's first gradient makes no update.

    State per matrix (m, n): see `soap_`; 4 (2 m n + 2 m^2 + 2 n^2) bytes, fp32 at least. DTensor gradients are
    gathered, the whole state is kept on every process and each updates its own shard. Steps run outside
    torch.compile, which cannot trace the eigensolver's fallback. Raises ValueError for options out of range.
    Source: Vyas et al. 2024, arXiv:2409.11321.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        gram_beta: float | None = None,
        refresh_every: int = 10,
        max_side: int = MAX_SIDE,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "gram_beta": gram_beta, "refresh_every": refresh_every, "max_side": max_side,
        }  # fmt: skip
        super().__init__(params, defaults)

    @not_traced  # the eigensolver falls back to float64 on an exception
    def step(self, closure: Any = None) -> Any:
        """As any optimizer's; the first step of a matrix only sets up its bases."""
        return super().step(closure)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_adam(group)
        if group["gram_beta"] is not None:
            check_unit("gram_beta", group["gram_beta"])
        for option in ("refresh_every", "max_side"):
            if group[option] < 1:
                raise ValueError(f"{option}={group[option]} must be at least 1")

    def _init_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if param.ndim >= 2 and min(matrix_sides(param)) <= group["max_side"]:
            init_soap_state(param, state, group["max_side"])
        else:
            init_adam_state(param, state)

    def _update(self, group: dict[str, Any]) -> None:
        for param in self._active(group):
            state = self.state[param]
            if any(gram in state for gram, _ in SIDES):
                self._update_matrix(param, state, group)
            else:
                _update_plain(param, state, group)

    def _update_matrix(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad = whole(param.grad)
        gram_beta = group["betas"][1] if group["gram_beta"] is None else group["gram_beta"]
        direction = soap_direction_(
            grad.reshape(matrix_sides(param)), state, group["betas"], gram_beta, group["eps"], group["refresh_every"]
        )
        if direction is not None:
            mine = scatter(direction.view(1, *param.shape), param)[0]
            apply_(local(param), mine, number(group["lr"]), group["weight_decay"])


def matrix_sides(param: Tensor) -> tuple[int, int]:
    """(first axis, product of the rest)."""
    return param.shape[0], param.shape[1:].numel()


def _update_plain(param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Adam in the parameter's own coordinates, with this module's place for eps and its decay after the step."""
    lr, weight = number(group["lr"]), local(param)
    state["step"] += 1
    adamw_(
        [weight], [local_like(param.grad, param)], [local(state["exp_avg"])], [local(state["exp_avg_sq"])],
        step=int(state["step"]), lr=lr, betas=group["betas"], eps=group["eps"], eps_form="uncorrected",
    )  # fmt: skip
    if group["weight_decay"]:
        weight.mul_(1 - lr * group["weight_decay"])
