"""The declared claims. Smallest effects of interest were set before the first run."""

from __future__ import annotations

from trimtab.lab.studies.claims.claim import (
    Claim,
    Direction,
    Hypothesis,
    Metric,
    Rates,
    Steps,
    Variant,
)

BF16_ROUNDING = 2.0**-9
"""Half of the smallest relative distance between neighbouring bf16 numbers: rounding to bf16 would undo a smaller
shrinkage of the weights completely."""

_BASE = Rates(starter=1e-3, other=2e-4)
_USUAL = Steps(cpu=100, cuda=300, large=150)
_SPEEDS = (Metric.SPEED, Metric.MATHEMATICS, Metric.GENERAL)

WEIGHT_DECAY = Claim(
    name="weight_decay",
    title="Weight decay and forgetting",
    background=(
        "A widespread recipe for continued pre-training says: without weight decay grammar is forgotten, 0.001 is "
        "light, 0.01 is right, 0.1 is strong and 1.0 destroys the model. Decoupled decay multiplies the weights by "
        "1 − learning rate × decay at each step and does nothing else, so over a run it can do no more than shrink "
        "them by 1 − exp(−Σ learning rate × decay), which the table states. At a learning rate of 2e-5, decay 0.1 "
        "and 500 steps that is 0.1 %. Here learning rate × steps is about 0.4, forty times as much, and the rate falls "
        "only in the last tenth of the run, so that an effect could show: 0.01 shrinks weights by 0.4 %, 0.1 by 4 %, "
        "1.0 by a third. As such a rate forgets much by itself, half of every variant's sequences are replayed general "
        "text, and five seeds make the intervals narrow. Note the proportions: AdamW moves a weight w by about the "
        "learning rate per step, decay by learning rate × decay × w, which for weights well below 1 and decay 0.01 is "
        "less than a hundredth of that."
    ),
    variants=tuple(
        Variant(name, {"weight_decay": float(name)}, replay=0.5) for name in ("0", "0.001", "0.01", "0.1", "1.0")
    ),
    baseline="0.01",
    hypotheses=(
        Hypothesis(
            "Without weight decay grammar is lost that 0.01 keeps.",
            "0", "0.01", Metric.GRAMMAR, Direction.LOWER, 2.0,
        ),
        Hypothesis(
            "Without weight decay general text is forgotten that 0.01 keeps.",
            "0", "0.01", Metric.GENERAL, Direction.HIGHER, 0.02,
        ),
        Hypothesis(
            "A decay of 0.001 is too light: it forgets more general text than 0.01.",
            "0.001", "0.01", Metric.GENERAL, Direction.HIGHER, 0.02,
        ),
        Hypothesis(
            "A decay of 0.1 is strong: it learns less mathematics than 0.01.",
            "0.1", "0.01", Metric.MATHEMATICS, Direction.HIGHER, 0.01,
        ),
        Hypothesis(
            "A decay of 1.0 destroys general text.",
            "1.0", "0.01", Metric.GENERAL, Direction.HIGHER, 0.1,
        ),
        Hypothesis(
            "A decay of 1.0 destroys grammar.",
            "1.0", "0.01", Metric.GRAMMAR, Direction.LOWER, 2.0,
        ),
    ),
    keys={"lr_scheduler_type": "warmup_stable_decay"},
    cpu_keys={"max_seq_length": 64},
    seeds=5,
    rates=Rates(starter=5e-4, other=1e-3),
    steps=Steps(cpu=800, cuda=1000, large=400),
    least_shrink=BF16_ROUNDING,
)  # fmt: skip

REPLAY = Claim(
    name="replay",
    title="Replay: general text mixed into the training data",
    background=(
        "Mixing some of the old text into the new is the oldest remedy against forgetting. Every variant has the same "
        "number of steps and tokens, so replayed text takes the place of mathematics: less is forgotten, and perhaps "
        "less is learned."
    ),
    variants=(
        Variant("0"),
        *(Variant(f"{share:g}", replay=share) for share in (0.1, 0.25, 0.5)),
    ),
    baseline="0",
    hypotheses=(
        Hypothesis(
            "A tenth of replayed text keeps general text from being forgotten.",
            "0.1", "0", Metric.GENERAL, Direction.LOWER, 0.05,
        ),
        Hypothesis(
            "Half of it replayed keeps more general text than a tenth.",
            "0.5", "0.1", Metric.GENERAL, Direction.LOWER, 0.02,
        ),
        Hypothesis(
            "A tenth of replayed text costs no mathematics.",
            "0.1", "0", Metric.MATHEMATICS, Direction.EQUAL, 0.02,
        ),
        Hypothesis(
            "Half of it replayed costs mathematics.",
            "0.5", "0", Metric.MATHEMATICS, Direction.HIGHER, 0.02,
        ),
    ),
    rates=_BASE,
    steps=_USUAL,
)  # fmt: skip

LEARNING_RATE = Claim(
    name="learning_rate",
    title="Learning rate: gain against forgetting",
    background=(
        "A low learning rate is the usual advice against forgetting. In a fixed number of steps it also learns less: "
        "the table has both, and the reader chooses."
    ),
    variants=tuple(
        Variant(name, {"learning_rate": float(name)}) for name in ("2e-5", "1e-4", "5e-4", "2e-3")
    ),
    baseline="5e-4",
    hypotheses=(
        Hypothesis(
            "At 1e-4 less general text is forgotten than at 5e-4.",
            "1e-4", "5e-4", Metric.GENERAL, Direction.LOWER, 0.05,
        ),
        Hypothesis(
            "At 1e-4 less mathematics is learned than at 5e-4.",
            "1e-4", "5e-4", Metric.MATHEMATICS, Direction.HIGHER, 0.02,
        ),
        Hypothesis(
            "At 2e-3 more general text is forgotten than at 5e-4.",
            "2e-3", "5e-4", Metric.GENERAL, Direction.HIGHER, 0.05,
        ),
        Hypothesis(
            "At 2e-3 more mathematics is learned than at 5e-4.",
            "2e-3", "5e-4", Metric.MATHEMATICS, Direction.LOWER, 0.02,
        ),
    ),
    rates=_BASE,
    steps=_USUAL,
)  # fmt: skip

OPTIMIZER_STATES = Claim(
    name="optimizer_states",
    title="AdamW with 8-bit states against fp32 states",
    background=(
        "`adamw_8bit` keeps both moments in 8 bits, blocks of 256 values with one scale each: 2.03 bytes per "
        "parameter instead of 8. Weights and arithmetic are fp32 in both variants, so the states are the only "
        "difference. The claim is that training ends at the same loss."
    ),
    variants=(
        Variant("adamw_torch", {"optim": "adamw_torch"}),
        Variant("adamw_8bit", {"optim": "adamw_8bit"}),
    ),
    baseline="adamw_torch",
    hypotheses=(
        Hypothesis(
            "With 8-bit states mathematics is learned as well as with fp32 states.",
            "adamw_8bit", "adamw_torch", Metric.MATHEMATICS, Direction.EQUAL, 0.01,
        ),
        Hypothesis(
            "With 8-bit states general text is forgotten no more and no less than with fp32 states.",
            "adamw_8bit", "adamw_torch", Metric.GENERAL, Direction.EQUAL, 0.01,
        ),
    ),
    rates=_BASE,
    steps=_USUAL,
)  # fmt: skip

ROUNDING = Claim(
    name="rounding",
    title="bf16 weights: rounding to nearest against stochastic rounding",
    background=(
        "Two neighbouring bf16 numbers differ by 0.4 to 0.8 % of their size. At a learning rate of 2e-5 most updates "
        "are smaller than half of that, and rounding to the nearest number gives the old weight back. Stochastic "
        "rounding goes up or down with the right probability, so that weights move as they should on average. "
        "`adamw_torch_fused` (bf16 states) rounds to nearest, `adamw_bf16` (bf16 states too) stochastically; the "
        "third variant keeps weights and states in fp32."
    ),
    variants=(
        Variant("nearest", {"optim": "adamw_torch_fused", "weights_dtype": "bf16"}),
        Variant("stochastic", {"optim": "adamw_bf16", "weights_dtype": "bf16"}),
        Variant("fp32 weights", {"optim": "adamw_torch", "weights_dtype": "fp32"}),
    ),
    baseline="stochastic",
    hypotheses=(
        Hypothesis(
            "Rounded to nearest, bf16 weights learn less than with stochastic rounding.",
            "nearest", "stochastic", Metric.MATHEMATICS, Direction.HIGHER, 0.05,
        ),
        Hypothesis(
            "Rounded stochastically, bf16 weights learn as much as fp32 weights.",
            "stochastic", "fp32 weights", Metric.MATHEMATICS, Direction.EQUAL, 0.02,
        ),
    ),
    keys={"dtype": "bf16"},
    rates=Rates(starter=2e-5, other=2e-5),
    steps=_USUAL,
)  # fmt: skip

PACKING = Claim(
    name="packing",
    title="Packing against padding",
    background=(
        "With packing, several documents fill a sequence and none sees another; without it each sequence has one "
        "document and padding, on which computation is wasted. Both variants see the same documents once. The "
        "padded batch has three times as many sequences, so that an optimizer step sees about as many documents in "
        "both, and the losses can be compared."
    ),
    variants=(
        Variant("padding", {"packing": False, "per_device_train_batch_size": 3}),
        Variant("packing", {"packing": True, "per_device_train_batch_size": 1}),
    ),
    baseline="padding",
    hypotheses=(
        Hypothesis(
            "Packing trains more tokens per second than padding.",
            "packing", "padding", Metric.SPEED, Direction.HIGHER, 20.0,
        ),
        Hypothesis(
            "Packing ends at the same mathematics loss as padding.",
            "packing", "padding", Metric.MATHEMATICS, Direction.EQUAL, 0.02,
        ),
    ),
    keys={"max_seq_length": 512, "probe": False},
    rates=_BASE,
    steps=Steps(cpu=40, cuda=150, large=100),
    metrics=_SPEEDS,
    documents_per_step=3,
)  # fmt: skip

GRADIENT_DTYPE = Claim(
    name="gradient_dtype",
    title="Gradients in bf16 against fp32",
    background=(
        "With bf16 weights, gradients are added up over microbatches in fp32 (4 bytes per parameter) or in bf16 (2 "
        "bytes). A sum in bf16 loses addends that are much smaller than it. Four microbatches per optimizer step, "
        "`adamw_8bit`, stochastic rounding: the settings of a run that has to save memory."
    ),
    variants=(
        Variant("fp32", {"gradient_dtype": "fp32"}),
        Variant("bf16", {"gradient_dtype": "bf16"}),
    ),
    baseline="fp32",
    hypotheses=(
        Hypothesis(
            "With bf16 gradients mathematics is learned as well as with fp32 gradients.",
            "bf16", "fp32", Metric.MATHEMATICS, Direction.EQUAL, 0.01,
        ),
        Hypothesis(
            "With bf16 gradients general text is forgotten no more and no less than with fp32 gradients.",
            "bf16", "fp32", Metric.GENERAL, Direction.EQUAL, 0.01,
        ),
    ),
    keys={
        "dtype": "bf16",
        "optim": "adamw_8bit",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
    },
    rates=_BASE,
    steps=Steps(cpu=60, cuda=300, large=150),
)  # fmt: skip

CLAIMS = {
    claim.name: claim
    for claim in (
        WEIGHT_DECAY,
        REPLAY,
        LEARNING_RATE,
        OPTIMIZER_STATES,
        ROUNDING,
        PACKING,
        GRADIENT_DTYPE,
    )
}
"""Claims by name, in the order of the report."""
