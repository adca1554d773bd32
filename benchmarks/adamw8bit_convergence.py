"""Convergence of 8-bit codes for AdamW's moments, compared with fp32 AdamW on a small transformer.

    python benchmarks/adamw8bit_convergence.py --commit $(git rev-parse --short HEAD)

Writes benchmarks/results/adamw8bit-convergence.json and prints it as a table:
  gap       held-out loss of a small transformer minus fp32's, mean over seeds and worst seed; the noise floor is
            fp32 from initial weights perturbed by 1e-6
  distance  least squares with columns of different scale: distance of the final weights from fp32's, relative to
            the distance that fp32 moved
  largest   largest update, in units of the learning rate, of a block whose gradients span ten orders of magnitude
            and half of which become zero midway (fp32: 1.3)
"""

# B sequences, T tokens, V vocabulary, C width, H heads, D head size

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from trimtab.kernels.adamw8bit import State8bit
from trimtab.kernels.adamw8bit.code import DEFAULT_FORMAT, QuantizationMap, StateFormat
from trimtab.kernels.adamw8bit.impl_reference import adamw8bit_step, new_state
from trimtab.kernels.adamw8bit.spec import MIN_8BIT_SIZE
from trimtab.kernels.adamw8bit.update import apply_, moments_

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, BATCH = 256, 64, 2, 4, 48, 8
LR, BETA1, BETA2, EPS, DECAY, WARMUP = 3e-3, 0.9, 0.999, 1e-8, 0.1, 20
HYPER = {"beta1": BETA1, "beta2": BETA2, "eps": EPS}


def dynamic_table(signed: bool) -> list[float]:
    """bitsandbytes' dynamic tree: seven decades below 1, each with twice the entries of the one below."""
    table = [0.0, 1.0]
    for decade in range(7):
        items = 2**decade if signed else 2 ** (decade + 1)
        positive = [10.0 ** (decade - 6) * (0.1 + 0.9 / items * (i + 0.5)) for i in range(items)]
        table += positive + [-value for value in positive] if signed else positive
    return sorted(table)


def linear_table(signed: bool) -> list[float]:
    """Uniformly spaced: −128/127 (never used), −1 … 1; or 0, 1/255 … 1."""
    return [(i - 128) / 127 for i in range(256)] if signed else [i / 255 for i in range(256)]


class TableCode:
    """A code of any 256 ascending values."""

    peak = 1.0

    def __init__(self, values: list[float]) -> None:
        self.table = torch.tensor(values, dtype=torch.float64).float()
        self.zero = int(self.table.abs().argmin())
        # The upper 16 bits of a value select a cell with at most one table entry: a lookup and a comparison find the
        # entry below ten times as fast as a binary search.
        cells = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).roll(1 << 15) << 16
        ends = torch.stack([cells, cells | 0xFFFF]).view(torch.float32)
        ends = torch.where(ends.isnan(), ends[0].nan_to_num(), ends)
        low, high = (
            torch.bucketize(end, self.table[1:-1], right=True) for end in (ends.amin(0), ends.amax(0))
        )
        assert int((high - low).max()) <= 1
        self.lowest = low.int()
        self.gap = torch.diff(self.table, append=torch.tensor([torch.inf]))

    def decode(self, codes_N: torch.Tensor) -> torch.Tensor:
        """uint8 → fp32."""
        return self.table.index_select(0, codes_N.reshape(-1).int()).view(codes_N.shape)

    def encode(self, value_N: torch.Tensor, fraction_N: torch.Tensor) -> torch.Tensor:
        """The entry below, or the one above if the relative position between them exceeds `fraction_N`."""
        flat_N = value_N.reshape(-1)
        below_N = self.lowest.index_select(0, (flat_N.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
        below_N += flat_N >= self.table.index_select(0, below_N + 1)
        below_N.clamp_(max=254)
        share_N = (flat_N - self.table.index_select(0, below_N)) / self.gap.index_select(0, below_N)
        return (below_N + (share_N > fraction_N.reshape(-1))).view(value_N.shape)


class Nearest:
    """A code with rounding to nearest; `no_zero`: a positive value never becomes zero."""

    def __init__(self, code: QuantizationMap, no_zero: bool = False) -> None:
        self.code, self.no_zero, self.zero, self.decode = code, no_zero, code.zero, code.decode
        self.peak = code.peak

    def encode(self, value_N: torch.Tensor, fraction_N: torch.Tensor) -> torch.Tensor:
        """Rounding to nearest is a fraction of one half."""
        codes_N = self.code.encode(value_N, torch.full_like(fraction_N, 0.5))
        return torch.maximum(codes_N, (value_N > 0).to(codes_N.dtype)) if self.no_zero else codes_N


SHIPPED_NAME = "quartic √v, random"


def formats() -> dict[str, StateFormat]:
    """The candidates by their names in the table."""
    linear1, linear2 = TableCode(linear_table(True)), TableCode(linear_table(False))
    dynamic1, dynamic2 = TableCode(dynamic_table(True)), TableCode(dynamic_table(False))
    even1 = TableCode([-1.0, *dynamic_table(True)[1:]])  # bitsandbytes' table begins at −0.993
    return {
        "linear v, nearest": StateFormat(Nearest(linear1), Nearest(linear2), root=False),
        "linear √v, nearest, no zero": StateFormat(
            Nearest(linear1), Nearest(linear2, no_zero=True), root=True
        ),
        "linear √v, random": StateFormat(linear1, linear2, root=True),
        "dynamic v, nearest": StateFormat(Nearest(dynamic1), Nearest(dynamic2), root=False),
        "dynamic √v, nearest, no zero": StateFormat(
            Nearest(even1), Nearest(dynamic2, no_zero=True), root=True
        ),
        "dynamic √v, random": StateFormat(even1, dynamic2, root=True),
        "quartic √v, nearest": StateFormat(
            Nearest(DEFAULT_FORMAT.first), Nearest(DEFAULT_FORMAT.second), root=True
        ),
        SHIPPED_NAME: DEFAULT_FORMAT,
    }


class Block(torch.nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """[B, T, C] → [B, T, C]"""
        batch, length, _ = x_BTC.shape
        q, k, v = self.qkv(self.norm1(x_BTC)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed_BHTD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.out(mixed_BHTD.transpose(1, 2).reshape(batch, length, WIDTH))
        return x_BTC + self.down(F.gelu(self.up(self.norm2(x_BTC))))


class Model(torch.nn.Module):
    """A byte-level decoder with 150,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.position = torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the next token."""
        x_BTC = self.token(ids_BT[:, :-1]) + self.position.weight[: ids_BT.shape[1] - 1]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return F.cross_entropy(self.head(self.norm(x_BTC)).flatten(0, 1), ids_BT[:, 1:].flatten())


def corpus(seed: int, tokens: int) -> torch.Tensor:
    """Text of a second-order Markov chain with Zipf-distributed bytes, so that rare bytes have rare gradients."""
    generator = torch.Generator().manual_seed(1000 + seed)
    weight = 1.0 / torch.arange(1, VOCABULARY + 1)
    successors = torch.multinomial(weight.expand(VOCABULARY * 4, -1), 6, generator=generator).tolist()
    choice = torch.multinomial(torch.tensor([8.0, 4, 2, 1, 1, 1]), tokens, True, generator=generator).tolist()
    text = [0, 1]
    for pick in choice:
        text.append(successors[text[-1] * 4 + text[-2] % 4][pick])
    return torch.tensor(text)


class Trained:
    """One optimizer over all parameters: fp32, one of the formats, or bitsandbytes."""

    def __init__(self, params: list[torch.nn.Parameter], fmt: StateFormat | None) -> None:
        self.params, self.fmt, self.count = params, fmt, 0
        self.states: list[Any] = [
            new_state(p, fmt)
            if fmt is not None and p.numel() >= MIN_8BIT_SIZE
            else (torch.zeros_like(p), torch.zeros_like(p))
            for p in params
        ]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all parameters."""
        self.count += 1
        for index, (p, state) in enumerate(zip(self.params, self.states, strict=True)):
            decay = DECAY if p.ndim > 1 else 0.0
            if isinstance(state, State8bit):
                assert self.fmt is not None
                where = {"step": self.count, "param_index": index}
                adamw8bit_step(p, p.grad, state, lr=lr, **HYPER, weight_decay=decay, **where, fmt=self.fmt)
            else:
                moments_(*state, p.grad, beta1=BETA1, beta2=BETA2)
                apply_(p, state[0], state[1].sqrt(), lr=lr, **HYPER, weight_decay=decay, step=self.count)


class Bitsandbytes:
    """bitsandbytes' AdamW8bit with the same groups."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        import bitsandbytes

        groups = [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.inner = bitsandbytes.optim.AdamW8bit(groups, lr=LR, betas=(BETA1, BETA2), eps=EPS)

    def step(self, lr: float) -> None:
        """Update all parameters."""
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.step()


def train(
    name: str, fmt: StateFormat | None, seed: int, steps: int, text: torch.Tensor
) -> tuple[float, float]:
    """(held-out loss after `steps`, seconds)."""
    torch.manual_seed(seed)
    model = Model()
    if name == "fp32, perturbed start":
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=1e-6)
    params = list(model.parameters())
    optimizer = optimizer_for(name, fmt, params)
    order = torch.Generator().manual_seed(seed)
    held_out = text[-64 * LENGTH :].view(64, LENGTH)
    start = time.perf_counter()
    for step in range(steps):
        first = torch.randint(0, len(text) - 65 * LENGTH, (BATCH, 1), generator=order)
        loss = model(text[first + torch.arange(LENGTH)])
        for p in params:
            p.grad = None
        loss.backward()
        optimizer.step(LR * min(1.0, (step + 1) / WARMUP) * (1 - 0.9 * step / steps))
    with torch.no_grad():
        return model(held_out).item(), time.perf_counter() - start


def adversarial(fmt: StateFormat, steps: int = 200) -> float:
    """Largest update in units of the learning rate, with ε too small to have an effect."""
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(0, -10, 256)
    weight = torch.zeros(1, 256)
    state, largest = new_state(weight, fmt), 0.0
    for step in range(1, steps + 1):
        grad = (torch.randn(1, 256, generator=generator) + 1) * size
        if step > steps // 2:
            grad[:, ::2] = 0
        before = weight.clone()
        hyper = {"lr": 1e-3, "beta1": BETA1, "beta2": BETA2, "eps": 1e-20, "weight_decay": 0.0}
        adamw8bit_step(weight, grad, state, **hyper, step=step, fmt=fmt)
        largest = max(largest, ((weight - before).abs().max() / 1e-3).item())
    return largest


def least_squares(optimizer: Any, weight: torch.nn.Parameter, steps: int = 500) -> torch.Tensor:
    """The final weight after least squares on 128 inputs whose scales span two orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 128, generator=generator) * torch.logspace(0, -2, 128)
    targets = inputs @ torch.randn(128, 64, generator=generator)
    for _ in range(steps):
        weight.grad = None
        (inputs @ weight.t() - targets).square().mean().backward()
        optimizer.step(1e-2)
    return weight.detach()


def optimizer_for(name: str, fmt: StateFormat | None, params: list[torch.nn.Parameter]) -> Any:
    """fp32, a format, or bitsandbytes."""
    return Bitsandbytes(params) if name == "bitsandbytes" else Trained(params, fmt)


def study(seeds: int, steps: int) -> list[dict[str, Any]]:
    """Evaluate all candidates, one row each."""
    candidates: dict[str, StateFormat | None] = {"fp32": None, "fp32, perturbed start": None, **formats()}
    try:
        import bitsandbytes  # noqa: F401

        candidates["bitsandbytes"] = None
    except ImportError:
        print("bitsandbytes is not installed: its row is omitted")
    texts = [corpus(seed, 40_000) for seed in range(seeds)]
    start = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)) * 0.02
    rows: list[dict[str, Any]] = []
    solution = start
    for name, fmt in candidates.items():
        results = [train(name, fmt, seed, steps, texts[seed]) for seed in range(seeds)]
        losses = [loss for loss, _ in results]
        gaps = [loss - fp32 for loss, fp32 in zip(losses, rows[0]["losses"] if rows else losses, strict=True)]
        weight = torch.nn.Parameter(start + (1e-6 if name == "fp32, perturbed start" else 0))
        end = least_squares(optimizer_for(name, fmt, [weight]), weight)
        solution = solution if rows else end
        row = {"name": name, "losses": losses, "gap_mean": sum(gaps) / seeds, "gap_worst": max(gaps, key=abs)}
        row["distance"] = ((end - solution).norm() / (solution - start).norm()).item()
        row["largest_update"] = None if fmt is None else adversarial(fmt)
        row["seconds"] = sum(seconds for _, seconds in results)
        rows.append(row)
        print(_line(row), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    mark = " *" if row["name"] == SHIPPED_NAME else ""
    loss = sum(row["losses"]) / len(row["losses"])
    largest = "" if row["largest_update"] is None else f"{row['largest_update']:10.3g}"
    gaps = f"{row['gap_mean']:+9.4f} {row['gap_worst']:+9.4f}"
    return f"{row['name'] + mark:30} {loss:8.4f} {gaps} {row['distance']:9.1%} {largest}"


def main() -> None:
    """Run the study on one thread and save its data."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--commit", default="unknown", help="commit to record with the results")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/adamw8bit-convergence.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'moments':30} {'loss':>8} {'gap':>9} {'worst':>9} {'distance':>9} {'largest':>10}")
    rows = study(options.seeds, options.steps)
    print("* shipped")
    place = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    settings = {
        "seeds": options.seeds,
        "steps": options.steps,
        "lr": LR,
        "betas": [BETA1, BETA2],
        "threads": 1,
    }
    report = {"version": 1, "commit": options.commit, "place": place, "settings": settings, "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
