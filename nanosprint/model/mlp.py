"""The feed-forward half of a layer: two projections around an activation."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanosprint.config.model import MLPSpec, ModelConfig
from nanosprint.config.recipe import Fp8MLPSpec
from nanosprint.model.fp8_mlp import Fp8MLP
from nanosprint.model.linear import init_linear, init_projection, linear
from nanosprint.model.mixing import ScalarWeight
from nanosprint.model.roles import Role
from nanosprint.ops.fp8_copies import Copy
from nanosprint.ops.linear_relu2 import relu2_mlp


def relu2(x: Tensor) -> Tensor:
    """max(x, 0) squared (So et al. 2021, Primer, arXiv:2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": relu2,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class MLP(nn.Module):
    """x (B, S, D) -> (B, S, D) through `hidden` units. `down` is (D, hidden), or (hidden, D) in the layout "in_out"."""

    ROLES = {
        "up": Role("matrix.mlp_up"),
        "down": Role("matrix.mlp_down"),
        "up_bias": Role("vector.bias"),
        "down_bias": Role("vector.bias"),
    }

    def __init__(self, config: ModelConfig, spec: MLPSpec) -> None:
        super().__init__()
        self.config, self.activation = config, ACTIVATIONS[spec.activation]
        self.in_out = spec.down_layout == "in_out"
        self.up = nn.Parameter(torch.empty(spec.hidden, config.dim))
        down = (spec.hidden, config.dim) if self.in_out else (config.dim, spec.hidden)
        self.down = nn.Parameter(torch.empty(down))
        self.up_bias = nn.Parameter(torch.zeros(spec.hidden)) if config.bias else None
        self.down_bias = nn.Parameter(torch.zeros(config.dim)) if config.bias else None
        self.fp8: Fp8MLP | None = None
        self.fused = False
        self._number: tuple[ScalarWeight, ...] = ()  # at most one; in a tuple it is no module of this one

    def init_weights(self, generator: torch.Generator) -> None:
        init = self.config.init
        init_linear(self.up, init, generator)
        down = self.down.detach().T if self.in_out else self.down.detach()
        init_projection(down, init, generator, self.config.num_layers, init.mlp_projection)

    def train_in_fp8(self, spec: Fp8MLPSpec) -> None:
        """From now on compute training's products in FP8, once `fp8_copies` have been made."""
        self.fp8 = Fp8MLP(self.up, spec, self.in_out)

    def fp8_copies(self, steps: int) -> list[Copy]:
        """What is to be quantised anew after `steps` updates."""
        return [] if self.fp8 is None else self.fp8.copies_of(self.up, self._last_matrix(), steps)

    def fuse(self) -> None:
        """From now on compute by the one operator of `ops.linear_relu2`, if it computes what the recipe asks for."""
        self.fused = self.activation is relu2 and self.up_bias is None

    def multiply_output_by(self, number: ScalarWeight) -> None:
        """From now on multiply what comes out by a learned number, which is another module's parameter. No biases."""
        assert self.down_bias is None
        self._number = (number,)

    def forward(self, x_BSD: Tensor) -> Tensor:
        down = self._last_matrix()
        if self.fp8 is not None and torch.is_grad_enabled():
            return self.fp8(x_BSD, self.up, down)
        if self.fused:
            return relu2_mlp(x_BSD, self.up, down, in_out=self.in_out)
        post = self.activation(linear(x_BSD, self.up, self.up_bias))
        return linear(post, down.T if self.in_out else down, self.down_bias)

    def _last_matrix(self) -> Tensor:
        """`down`, times the number that multiplies the output."""
        matrix: Tensor = self.down
        for number in self._number:
            matrix = number({}, {}) * matrix
        return matrix
