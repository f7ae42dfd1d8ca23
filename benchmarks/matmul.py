"""Which library multiplies float32 matrices faster on this CPU, for the shapes of a small transformer.

`stretto.engine.parallel.tensor.matmul` uses oneDNN on AVX-512 CPUs that are not Intel's; this checks that
choice.

    python benchmarks/matmul.py
"""

from __future__ import annotations

import torch
from harness import arguments, race, report

from stretto.engine.parallel.tensor import matmul

TOKENS = 512
SHAPES = ((256, 768), (256, 1024), (1024, 256), (256, 8192))  # in, out


def main() -> None:
    args = arguments(__doc__, rounds=40)
    torch.set_num_threads(1)
    for features, out in SHAPES:
        x, dy = torch.randn(TOKENS, features), torch.randn(TOKENS, out)
        weight, gradient = torch.randn(out, features), torch.zeros(out, features)

        def all_three(
            onednn: bool,
            x: torch.Tensor = x,
            dy: torch.Tensor = dy,
            weight: torch.Tensor = weight,
            gradient: torch.Tensor = gradient,
        ) -> None:
            chosen, matmul.ONEDNN = matmul.ONEDNN, onednn
            matmul.linear(x, weight, None)
            matmul.input_gradient(dy, weight)
            matmul.add_weight_gradient(gradient, dy, x, gradient.dtype)
            matmul.ONEDNN = chosen

        contestants = {"BLAS": lambda: all_three(False), "oneDNN": lambda: all_three(True)}
        timings = race(contestants, "BLAS", rounds=args.rounds)
        report(
            f"linear {features} -> {out}, {TOKENS} tokens, forward and both gradients",
            timings,
            "BLAS",
            args.out,
        )
    print(f"chosen here: {'oneDNN' if matmul.ONEDNN else 'BLAS'}")


if __name__ == "__main__":
    main()
