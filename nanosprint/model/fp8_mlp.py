"""The state of an MLP that trains in FP8: copies of its weights, and the scales they and the activations have.

Three scales are looked up rather than measured when they are needed: measuring costs a pass over a tensor before the
pass that quantises it.

- W_up: that of its present values, renewed with the copy after every update. Exact.
- W_down: in the first updates, that of its present values: a weight that starts at zero grows without measure. Later
  that of the values one update ago, with some headroom. What exceeds it is clamped.
- post, the activations: that of the forward pass before, with more headroom. Every call in training advances it, so
  it follows the micro-batches, whatever their size, and each process has its own. A checkpoint holds one of them.

All of it is buffers, so checkpoints keep it and warm-up puts it back.
"""

import torch
from torch import Tensor, nn

from nanosprint.config.recipe import Fp8MLPSpec
from nanosprint.ops.fp8_mlp import Fp8Weights, fp8_mlp, scale_from, scale_of, to_e4m3

_SCALES = ("up_scale", "down_scale", "next_down_scale", "post_scale")


class Fp8MLP(nn.Module):
    """x (B, S, D) -> (B, S, D): squared ReLU between products in FP8; see `ops.fp8_mlp`."""

    up_scale: Tensor
    down_scale: Tensor
    next_down_scale: Tensor
    post_scale: Tensor
    up_codes: Tensor
    down_codes: Tensor

    def __init__(self, up: Tensor, spec: Fp8MLPSpec, in_out: bool) -> None:
        """up (F, D) tells sizes and device. `in_out`: the second weight is (F, D), not (D, F)."""
        super().__init__()
        self.spec, self.in_out = spec, in_out
        hidden, dim = up.shape
        for name in _SCALES:
            self.register_buffer(name, torch.ones((), device=up.device))
        # Bytes: a module that is cast to another float dtype would cast FP8 buffers with it.
        for name, shape in (("up_codes", (hidden, dim)), ("down_codes", (dim, hidden))):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.uint8, device=up.device))

    def forward(self, x_BSD: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """Training only: it advances the scale of the activations."""
        down_codes = self.down_codes if self.spec.down else None
        copies = Fp8Weights(self.up_codes, self.up_scale, down_codes, self.down_scale, self.post_scale)
        y, peak = fp8_mlp(x_BSD, up, down, copies, in_out=self.in_out)
        with torch.no_grad():
            self.post_scale.copy_(scale_from(peak, self.spec.activation_headroom))
        return y

    @torch.no_grad()
    def refresh(self, up: Tensor, down: Tensor, steps: int) -> None:
        """Quantise the weights anew. `steps`: updates done so far, 0 for the initial values."""
        self.up_scale.copy_(scale_of(up))
        self.up_codes.copy_(to_e4m3(up, self.up_scale).view(torch.uint8))
        if not self.spec.down:
            return
        down_DF = down.mT if self.in_out else down
        present = scale_of(down_DF)
        # What the codes are quantised with is what the product multiplies by: two buffers, for the next is known now.
        self.down_scale.copy_(present if steps <= self.spec.bootstrap_steps else self.next_down_scale)
        self.down_codes.copy_(to_e4m3(down_DF, self.down_scale).view(torch.uint8))
        self.next_down_scale.copy_(present * self.spec.weight_headroom)
