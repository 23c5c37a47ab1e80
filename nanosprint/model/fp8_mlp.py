"""The state of an MLP that trains in FP8: copies of its weights, and the scales they and the activations have.

Three scales are looked up rather than measured when they are needed: measuring costs a pass over a tensor before the
pass that quantises it.

- W_up: that of its present values, renewed with the copy after every update. Exact.
- W_down: in the first updates, that of its present values: a weight that starts at zero grows without measure. Later
  that of the values one update ago, with some headroom. What exceeds it is clamped.
- post, the activations: that of the forward pass before, with more headroom. Every call in training advances it, so
  it follows the micro-batches, whatever their size, and each process has its own. A checkpoint holds one of them.

The input's is measured in every call; or it is a constant, as no value of a vector of RMS 1 exceeds sqrt(D). All the
rest is buffers, so checkpoints keep it and warm-up puts it back. A backward pass in FP8 adds turned copies of the
weights; the scales of its gradients need no memory (`ops.fp8_mlp`).
"""

import torch
from torch import Tensor, nn

from nanosprint.config.recipe import Fp8MLPSpec
from nanosprint.ops.fp8 import LARGEST, scale_from
from nanosprint.ops.fp8_copies import Copy
from nanosprint.ops.fp8_mlp import Fp8Weights, fp8_mlp

_SCALES = ("up_scale", "down_scale", "next_down_scale", "post_scale")


class Fp8MLP(nn.Module):
    """x (B, S, D) -> (B, S, D): squared ReLU between products in FP8; see `ops.fp8_mlp`."""

    up_scale: Tensor
    down_scale: Tensor
    next_down_scale: Tensor
    post_scale: Tensor
    x_scale: Tensor | None
    up_codes: Tensor
    down_codes: Tensor
    up_turned: Tensor | None
    down_turned: Tensor | None

    def __init__(self, up: Tensor, spec: Fp8MLPSpec, in_out: bool) -> None:
        """up (F, D) tells sizes and device. `in_out`: the second weight is (F, D), not (D, F)."""
        super().__init__()
        self.spec, self.in_out = spec, in_out
        hidden, dim = up.shape
        for name in _SCALES:
            self.register_buffer(name, torch.ones((), device=up.device))
        static = torch.full((), dim**0.5 / LARGEST, device=up.device) if spec.input == "static" else None
        self.register_buffer("x_scale", static, persistent=False)
        # Bytes: a module that is cast to another float dtype would cast FP8 buffers with it.
        for name, shape, wanted in (
            ("up_codes", (hidden, dim), True),
            ("down_codes", (dim, hidden), True),
            ("up_turned", (dim, hidden), spec.backward),
            ("down_turned", (hidden, dim), spec.backward or in_out),  # as `down` lies in memory: made on the way
        ):
            codes = torch.zeros(shape, dtype=torch.uint8, device=up.device) if wanted else None
            self.register_buffer(name, codes, persistent=spec.backward or not name.endswith("turned"))

    def forward(self, x_BSD: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """Training only: it advances the scale of the activations."""
        down_codes = self.down_codes if self.spec.down else None
        turned = (self.up_turned, self.down_turned) if self.spec.backward else (None, None)
        copies = Fp8Weights(
            self.up_codes, self.up_scale, down_codes, self.down_scale, self.post_scale, self.x_scale, *turned
        )
        y, peak = fp8_mlp(x_BSD, up, down, copies, in_out=self.in_out, weights=self.spec.weights)
        with torch.no_grad():
            self.post_scale.copy_(scale_from(peak, self.spec.activation_headroom))
        return y

    def copies_of(self, up: Tensor, down: Tensor, steps: int) -> list[Copy]:
        """What is to be renewed after an update. `steps`: updates done so far, 0 for the initial values."""
        copies = [Copy((up,), self.up_codes, self.up_turned, self.up_scale)]
        if self.spec.down or self.spec.backward:
            codes, turned = self.down_codes, self.down_turned
            if self.in_out:
                assert turned is not None
                codes, turned = turned, codes
            # What the codes are quantised with is what the product multiplies by: two buffers, for the next is known.
            lag = self.next_down_scale, self.spec.weight_headroom, steps <= self.spec.bootstrap_steps
            copies.append(Copy((down,), codes, turned, self.down_scale, None, *lag))
        return copies
