"""The recipe schema: every setting of a run, typed and documented.

Keys have Hugging Face's names where Hugging Face has one. The docstring of a field is its description: the reference
page and the JSON schema for editors are generated from it. Types are strict: `yes` is a string, not a boolean; `1` and
`2e-5` are numbers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from trimtab.facts.dtypes import dtype_alias
from trimtab.facts.names import unusable_name
from trimtab.recipe.rules import find_violations

Attention = Literal[
    "auto", "reference", "sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "varlen", "flex", "triton"
]
Optimizer = Literal["adamw_torch", "adamw_torch_fused", "adamw_bf16", "adamw_8bit"]
OptimizerImplementation = Literal["auto", "reference", "triton", "triton_exact"]
Schedule = Literal["cosine", "linear", "constant", "constant_with_warmup", "warmup_stable_decay"]
Documents = Literal["file", "blank-lines", "lines"]
RowFormat = Literal["auto", "text", "messages", "sharegpt", "prompt-completion", "alpaca"]
TrainOn = Literal["completions", "last", "all"]
BadRows = Literal["stop", "skip"]
MathField = Literal["math", "arithmetic", "algebra", "calculus"]
Tracker = Literal["tensorboard", "wandb"]
Policy = Literal["none", "pointwise", "selective", "block", "offload_half", "offload_attention", "offload"]


def _validate_name(text: str | None, *, is_text_file: bool = False) -> str | None:
    """Validates a string that names a file, a folder or a repository."""
    wrong = None if text is None else unusable_name(text, is_text_file=is_text_file)
    if wrong is not None:
        raise PydanticCustomError("unusable_name", "{cause}", {"cause": wrong[0], "remedy": wrong[1]})
    return text


def _validate_source(text: str) -> str | None:
    return _validate_name(text, is_text_file=True)


FileName = AfterValidator(_validate_name)
SourceName = AfterValidator(_validate_source)
TorchDtypeName = BeforeValidator(dtype_alias)
Count = Annotated[int, Field(ge=1)]
Device = Literal["auto", "cpu", "cuda"] | Annotated[str, Field(pattern=r"^cuda:(0|[1-9][0-9]{0,3})$")]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Rank = Annotated[int, Field(ge=1, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]


class RecipeSection(BaseModel):
    """Base of all sections of a recipe: strict types, unknown keys forbidden, frozen after loading."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        # Hugging Face's own names must stay usable: `model.name`, `model_…`.
        protected_namespaces=(),
    )


class Shorthand(RecipeSection):
    """A section that may be written as a single string, the value of its main key."""

    @classmethod
    def main_key(cls) -> str:
        """The key that the single string sets."""
        return next(iter(cls.model_fields))

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        return {cls.main_key(): data} if isinstance(data, str) else data

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler(core)]}


class Model(Shorthand):
    """The model to train. `model: NAME` is short for `model: {name: NAME}`."""

    name: Annotated[
        str, Field(min_length=1, examples=["Qwen/Qwen3-0.6B-Base", "./my-model", "model.gguf"]), FileName
    ]
    """Hub id, Hugging Face folder (config.json and safetensors), GGUF file, run folder of a full-parameter run (its
    latest checkpoint; or `RUN/checkpoints/best`, `RUN/checkpoints/step-…`), or `starter` for the small model that
    ships with trimtab."""
    revision: Annotated[str | None, Field(examples=["main"])] = None
    """Branch, tag or commit on the hub. It is resolved to a commit at first use, and the run records that commit."""
    tokenizer: Annotated[str | None, Field(min_length=1, examples=["./my-tokenizer"]), FileName] = None
    """Folder, hub id or GGUF file of a tokenizer that replaces the model's own. Default: the model's own."""
    chat_template: Annotated[str | None, Field(min_length=1, examples=["./chat.jinja"])] = None
    """Jinja file with a chat template, or the template itself; replaces the tokenizer's own. It is saved with the run
    and its exports. Required for training on conversations if the tokenizer has no template."""
    attn_implementation: Annotated[Attention, Field(examples=["auto"])] = "auto"
    """Attention backend. `auto` selects one when the run starts, prints the choice with its reason and records it in
    the run folder. A backend that is named here and does not support the model or device is an error; trimtab never
    falls back to another one."""
    added_tokens: Annotated[list[str], Field(examples=[["<|tool|>", "<|answer|>"]])] = []
    """Tokens to add to the tokenizer. The embedding is resized if it has no unused rows; new rows are initialized to
    the mean of the others. With `lora`, train them by listing `embed_tokens`, and `lm_head` if the model has an
    untied head, in `lora.modules_to_save`."""
    init: Annotated[Literal["pretrained", "random"], Field(examples=["pretrained"])] = "pretrained"
    """`pretrained` loads the weights. `random` uses the model's config and tokenizer and initializes new weights."""


class Source(Shorthand):
    """A data source. `PATH` is short for `{source: PATH}`."""

    source: Annotated[
        str, Field(min_length=1, examples=["./notes", "data/*.jsonl", "org/dataset"]), SourceName
    ]
    """File (text, Markdown, JSON lines, Parquet, CSV), folder, glob or hub dataset id, or a data set that ships with
    trimtab: `starter:math`, `starter:math-heldout`, `starter:chat` (conversations), `starter:general`,
    `starter:replay`. Relative paths are relative to the working directory, not to the recipe file."""
    split: Annotated[str, Field(min_length=1, examples=["train"])] = "train"
    """Split of a hub dataset."""
    config: Annotated[str | None, Field(examples=["wikitext-2-raw-v1"])] = None
    """Configuration of a hub dataset that has several."""
    revision: Annotated[str | None, Field(examples=["main"])] = None
    """Branch, tag or commit on the hub. It is resolved to a commit at first use, and the run records that commit."""
    text_column: Annotated[str | None, Field(examples=["text"])] = None
    """Column or JSON key with the text. Default: detected; if that fails, the error lists the columns."""
    format: Annotated[RowFormat, Field(examples=["messages"])] = "auto"
    """Format of a row: `text`; `messages`, a conversation in OpenAI's format; `sharegpt`, a conversation in the
    column `conversations`; `prompt-completion`, two strings or two lists of messages; or `alpaca`, with
    `instruction`, `input` and `output`. `auto` detects the format from the columns of the first row and prints it."""
    columns: Annotated[dict[str, str], Field(examples=[{"instruction": "question", "output": "answer"}])] = {}
    """Maps fields of the format to columns that have other names. The fields are `messages`, `conversations`,
    `prompt`, `completion`, `instruction`, `input`, `output`, `system` and `tools`."""
    train_on: Annotated[TrainOn, Field(examples=["completions"])] = "completions"
    """Tokens that contribute to the loss, for conversations and prompt/completion pairs: `completions` is every
    assistant turn with its end-of-turn token, `last` only the last assistant turn, `all` every token. In plain text
    every token contributes."""
    bad_rows: Annotated[BadRows, Field(examples=["skip"])] = "stop"
    """What to do with a row that does not match the format or that the chat template rejects: `stop` with its
    location before training starts, or `skip` it and report how many were skipped."""
    first: Annotated[Count | None, Field(examples=[10_000])] = None
    """Use only this many documents, from the start of the source. Default: all."""
    documents: Annotated[Documents, Field(examples=["lines"])] = "file"
    """How a text file is split into documents: one per file (`file`), at blank lines (`blank-lines`), or one per line
    (`lines`). Tables have one document per row."""
    weight: Annotated[float, Field(gt=0, examples=[2.0])] = 1.0
    """Passes over this source per epoch: 1 is once, 2 twice, 0.5 half of it; at most 1000."""


def _as_list(data: Any) -> Any:
    """Wraps a single source into a list."""
    return [data] if isinstance(data, str | dict) else data


def _trackers_as_list(data: Any) -> Any:
    """Converts Hugging Face's spellings `report_to: none` and `report_to: wandb` to a list."""
    return ([] if data == "none" else [data]) if isinstance(data, str) else data


Sources = Annotated[list[Source], BeforeValidator(_as_list, json_schema_input_type=Source | list[Source])]
Trackers = Annotated[
    list[Tracker],
    BeforeValidator(_trackers_as_list, json_schema_input_type=Literal["none"] | Tracker | list[Tracker]),
]


class Replay(RecipeSection):
    """General text mixed into the training data to reduce catastrophic forgetting."""

    share: Annotated[Fraction, Field(examples=[0.1])] = 0.1
    """Fraction of the sequences that is replayed text, between 0 and 1 (exclusive). If the other data is
    conversations, of which only some tokens contribute to the loss, the replayed fraction of the loss is larger."""
    sources: Annotated[Sources, Field(min_length=1, examples=[["./general-text"]])]
    """Sources of the replayed text."""


class Evaluation(RecipeSection):
    """Evaluation data: the loss on it is measured before, during and after training. It is never trained on."""

    domain: Annotated[Sources, Field(examples=[["./heldout-math"]])] = []
    """In-domain text, to measure what the model learns. The loss on it selects the best checkpoint. If empty, a
    fraction of the training documents is held out (`data.eval_share`)."""
    general: Annotated[Sources, Field(examples=[["starter:general"]])] = []
    """Text from other domains, to measure forgetting."""


class Data(RecipeSection):
    """Training and evaluation data."""

    train: Annotated[Sources, Field(min_length=1, examples=[["./notes", "data/*.jsonl"]])]
    """Training data: one source or a list of sources."""
    replay: Annotated[Replay | None, Field(examples=[{"share": 0.1, "sources": ["./general-text"]}])] = None
    """General text to mix in. Default: none."""
    eval: Annotated[
        Evaluation, Field(examples=[{"domain": ["./heldout"], "general": ["starter:general"]}])
    ] = Evaluation()
    """Evaluation data."""
    eval_share: Annotated[float, Field(ge=0, lt=1, examples=[0.01])] = 0.01
    """Fraction of the training documents that is held out for evaluation if `data.eval.domain` is empty; 0 holds out
    none. With `data.streaming` nothing can be held out: set `data.eval.domain` instead."""
    eval_sequences: Annotated[Count, Field(examples=[64])] = 64
    """Maximum number of sequences of `max_seq_length` tokens per evaluation set and evaluation."""
    streaming: Annotated[bool, Field(examples=[False])] = False
    """Read and tokenize during training instead of building a token cache first. The number of steps is then unknown,
    so `max_steps` is required."""
    chat_template_kwargs: Annotated[
        dict[str, str | int | float | bool], Field(examples=[{"enable_thinking": False}])
    ] = {}
    """Extra variables for the chat template; the model card lists those that it supports."""
    cache_dir: Annotated[str | None, Field(min_length=1, examples=["~/.cache/trimtab/tokens"]), FileName] = (
        None
    )
    """Folder of the token cache. Default: the user's cache folder."""
    num_proc: Annotated[Count | None, Field(examples=[8])] = None
    """Number of tokenizer processes. Default: one per core."""


class Lora(RecipeSection):
    """Train low-rank adapters (LoRA) and freeze the model's weights. Names are peft's."""

    r: Annotated[Rank, Field(examples=[16])] = 16
    """Rank of the adapters."""
    lora_alpha: Annotated[Positive, Field(examples=[32])] = 32
    """Scaling: the adapter's output is multiplied by `lora_alpha / r`."""
    target_modules: Annotated[
        str | list[str], Field(min_length=1, examples=["all-linear", ["q_proj", "v_proj"]])
    ] = "all-linear"
    """Modules that get an adapter: `all-linear` for every linear layer of the blocks, a list of names (`q_proj`, or
    full names), or a regular expression over full names (`model.layers.0.self_attn.q_proj`)."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1, examples=[0.05])] = 0.0
    """Dropout probability on the adapters' inputs during training. Masks are a function of the seed, so resumed runs
    and recomputed layers get the same ones."""
    use_rslora: Annotated[bool, Field(examples=[True])] = False
    """Rank-stabilized LoRA: scale by `lora_alpha / √r` instead, for high ranks."""
    use_dora: Annotated[bool, Field(examples=[True])] = False
    """DoRA: learn magnitude and direction of each row separately. Often better at low ranks, and slower."""
    rank_pattern: Annotated[dict[str, Rank], Field(examples=[{"down_proj": 32}])] = {}
    """Overrides `r` per module, by name or regular expression."""
    alpha_pattern: Annotated[dict[str, Positive], Field(examples=[{"down_proj": 64}])] = {}
    """Overrides `lora_alpha` per module, by name or regular expression."""
    modules_to_save: Annotated[list[str], Field(examples=[["embed_tokens", "lm_head"]])] = []
    """Modules that are trained in full, in the model's dtype: embeddings and head for added tokens, norms."""
    dtype: Annotated[Literal["fp32", "bf16"], TorchDtypeName, Field(examples=["fp32"])] = "fp32"
    """Dtype of the adapter weights. Matrix products run in the recipe's `dtype` in both cases."""
    adapter: Annotated[str | None, Field(min_length=1, examples=["./my-adapter"]), FileName] = None
    """Continue training an existing adapter: a folder written by peft or `trimtab export peft`. Rank, modules and all
    other settings come from it, and no other key may be set in `lora`."""


class Recipe(RecipeSection):
    """A training run: model, data, optimization, memory and output."""

    model: Annotated[Model, Field(examples=["Qwen/Qwen3-0.6B-Base"])]
    """The model to train."""
    data: Data
    """Training and evaluation data."""

    lora: Annotated[Lora | None, Field(examples=[{"r": 16, "lora_alpha": 32}])] = None
    """Train LoRA adapters instead of all parameters. `lora: {}` uses the defaults."""

    output_dir: Annotated[str, Field(min_length=1, examples=["runs/my-run"]), FileName] = "runs/train"
    """Run folder, for recipe, plan, metrics, checkpoints and report. Default: `runs/` and the name of the recipe
    file."""
    seed: Annotated[int, Field(ge=0, lt=2**63, examples=[42])] = 42
    """Random seed of data order, dropout, stochastic rounding and weight initialization."""

    max_seq_length: Annotated[int, Field(ge=4, examples=[1024])] = 1024
    """Sequence length in tokens. Default: 1024, or the model's maximum context length if that is shorter."""
    packing: Annotated[bool, Field(examples=[True])] = True
    """Pack several documents into each sequence; attention is masked between documents. `false` puts one document
    into each sequence and pads it."""
    group_by_length: Annotated[bool, Field(examples=[False])] = False
    """With `packing: false`: put documents of similar length into the same microbatch and pad it to its own longest
    document, rounded up to a multiple of 8, instead of to `max_seq_length`. Documents are shuffled first and sorted
    by length within mega-batches of 50 steps, then the microbatches are shuffled, so the order stays random and
    depends on the seed alone. Memory is planned for the longest microbatch. CUDA graphs are not used, because
    microbatches have many lengths."""
    per_device_train_batch_size: Annotated[Count, Field(examples=[4])] = 4
    """Microbatch size: sequences per forward and backward pass on each device. Activation memory grows with it."""
    gradient_accumulation_steps: Annotated[Count, Field(examples=[4])] = 4
    """Microbatches per optimizer step. The loss is normalized over all of them, so batch sizes 1×16, 4×4 and 16×1
    give the same loss and gradients, up to rounding."""
    num_train_epochs: Annotated[float | None, Field(gt=0, le=1e6, examples=[1.0])] = None
    """Epochs over the training data. Default: 1, unless `max_steps` is set."""
    max_steps: Annotated[int, Field(ge=-1, le=10**12, examples=[1000])] = -1
    """Total optimizer steps, instead of `num_train_epochs`; -1 uses epochs."""

    learning_rate: Annotated[float, Field(gt=0, examples=[2e-5])] = 2e-5
    """Peak learning rate."""
    embedding_learning_rate: Annotated[float | None, Field(gt=0, examples=[2e-6])] = None
    """Peak learning rate of embeddings and head, if they are trained; the schedule is the same. Default:
    `learning_rate`."""
    lr_scheduler_type: Annotated[Schedule, Field(examples=["cosine"])] = "linear"
    """Learning-rate schedule."""
    warmup_steps: Annotated[int, Field(ge=0, examples=[20])] = 0
    """Warm-up steps, over which the learning rate rises linearly from zero. Set this or `warmup_ratio`, not both."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1, examples=[0.03])] = 0.0
    """Warm-up as a fraction of all steps. Set this or `warmup_steps`, not both."""
    min_lr_ratio: Annotated[float, Field(ge=0, lt=1, examples=[0.1])] = 0.0
    """Final learning rate as a fraction of the peak."""

    optim: Annotated[Optimizer, Field(examples=["adamw_8bit"])] = "adamw_torch"
    """Optimizer. Bytes of state per parameter: `adamw_torch` 8, `adamw_bf16` 4, `adamw_8bit` about 2; these three
    apply stochastic rounding to bf16 weights. `adamw_torch_fused` is torch's own kernel: states in the dtype of the
    weights (8 bytes per parameter with fp32, 4 with bf16), bf16 weights rounded to nearest, so small updates are
    lost."""
    optim_implementation: Annotated[OptimizerImplementation, Field(examples=["auto"])] = "auto"
    """Implementation of `adamw_8bit`: `reference` uses torch operations on any device, `triton` is one kernel for all
    parameters on a CUDA GPU, `triton_exact` is bitwise identical to the reference and slower. `auto` selects one when
    the run starts, prints it and records it in the run folder. The states are the same for all."""
    optim_in_backward: Annotated[bool, Field(examples=[False])] = False
    """Run the optimizer inside the backward pass: each parameter is updated as soon as its gradient is complete, and
    the gradient is freed, so gradients take almost no memory. Gradient clipping and accumulation are not possible
    then: requires `max_grad_norm: 0` and `gradient_accumulation_steps: 1`."""
    weight_decay: Annotated[float, Field(ge=0, examples=[0.01])] = 0.01
    """Decoupled weight decay: each step shrinks the weights by `learning_rate × weight_decay`."""
    decay_all: Annotated[bool, Field(examples=[False])] = False
    """Apply weight decay to norms and biases too. Default: they are excluded, as in Hugging Face's Trainer."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1, examples=[0.9])] = 0.9
    """Decay rate β1 of AdamW's first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1, examples=[0.95])] = 0.999
    """Decay rate β2 of AdamW's second moment."""
    adam_epsilon: Annotated[float, Field(gt=0, examples=[1e-8])] = 1e-8
    """ε in AdamW's denominator."""
    max_grad_norm: Annotated[float, Field(ge=0, examples=[1.0])] = 1.0
    """Clip the global gradient norm to this value; 0 disables clipping."""
    label_smoothing_factor: Annotated[float, Field(ge=0, lt=1, examples=[0.1])] = 0.0
    """Label smoothing, as in `torch.nn.functional.cross_entropy`. It applies to the training loss; evaluation losses
    are plain cross-entropy."""
    z_loss: Annotated[float, Field(ge=0, lt=1, examples=[1e-4])] = 0.0
    """Coefficient of the z-loss: this times the squared log-sum-exp of each token's logits is added to the training
    loss, which keeps logits from drifting (PaLM uses 1e-4). Evaluation losses are plain cross-entropy."""

    device: Annotated[Device, Field(examples=["auto", "cpu", "cuda", "cuda:1"])] = "auto"
    """Training device. `auto` uses a CUDA GPU if there is one. `cuda:1` is the second visible GPU, `cuda` the current
    one (the first, unless the process selected another). A resumed run may continue on another GPU."""
    num_threads: Annotated[Count | None, Field(le=1024, examples=[8])] = None
    """CPU threads of torch's operations (`torch.set_num_threads`); takes precedence over `OMP_NUM_THREADS`. Default:
    `OMP_NUM_THREADS`, or one thread per core. The run records the number, because another one may change the order of
    reductions and with it the last bits of the losses."""
    dtype: Annotated[Literal["auto", "fp32", "bf16", "fp16"], TorchDtypeName, Field(examples=["bf16"])] = (
        "auto"
    )
    """Compute dtype. `auto` is bf16 if the device supports it in hardware, otherwise fp32. All dtype keys also accept
    torch's names (`bfloat16`, `float16`, `float32`)."""
    weights_dtype: Annotated[Literal["auto", "fp32", "bf16"], TorchDtypeName, Field(examples=["bf16"])] = (
        "auto"
    )
    """Dtype of the weights. `auto` follows `dtype`: bf16 for bf16 (with stochastic rounding, so that small updates
    are not lost), fp32 for fp32 and fp16."""
    gradient_dtype: Annotated[Literal["fp32", "bf16"], TorchDtypeName, Field(examples=["fp32"])] = "fp32"
    """Dtype in which gradients are accumulated. bf16 halves their memory and loses some precision; it requires bf16
    weights."""
    memory_limit: Annotated[str | None, Field(examples=["24GiB", "80%"])] = None
    """Device memory limit of the run, CUDA context included: a size (`24GiB` is 24 × 2³⁰ bytes, `24GB` is 24 × 10⁹;
    case does not matter, also `24gb`, `24 GB`, `24G`) or a share of the device (`80%`). Default: the memory that is
    free when the run starts. On a GPU the limit is enforced by the allocator."""
    recompute: Annotated[
        Literal["auto"] | Policy | list[Policy] | dict[Policy, Annotated[int, Field(ge=0)]],
        Field(examples=["auto", "selective", {"block": 20, "none": 8}]),
    ] = "auto"
    """Activation checkpointing: the recompute policy of each layer. `none` saves all activations; `pointwise`
    recomputes norms, RoPE and gates; `selective` recomputes everything but attention; `block` saves only the layer's
    input and recomputes the rest; `offload` is `block` with the input offloaded to host memory; `offload_attention`
    is `selective` and `offload_half` recomputes the feed-forward half, both with the saved activations offloaded. One
    policy for all layers, a list with one per layer, or the number of layers per policy (the remaining layers get
    `none`). `auto` selects the fastest assignment that fits `memory_limit`, prints it and records it in the run
    folder. Losses and gradients do not depend on the policy."""
    gradient_checkpointing: Annotated[bool | None, Field(examples=[True])] = None
    """Hugging Face's name for activation checkpointing: `true` is `recompute: block`, `false` is `recompute: none`."""
    mlp_tiles: Annotated[Literal["auto"] | Count, Field(examples=["auto", 8])] = "auto"
    """Tiled MLP, for very long sequences: the number of tiles along the token dimension in which each layer's
    feed-forward is computed, so that its activations are never materialized for all tokens. 1 disables tiling; `auto`
    uses the smallest number that fits."""
    load_in_4bit: Annotated[bool, Field(examples=[False])] = False
    """QLoRA: freeze the blocks' weights, quantized to 4 bits (NF4, as in bitsandbytes), and train adapters. Requires
    `lora`. Weights are quantized while loading; checkpoints quantized by bitsandbytes are loaded as they are."""
    load_in_8bit: Annotated[bool, Field(examples=[False])] = False
    """Like `load_in_4bit`, with 8 bits and one scale per row: twice the memory, smaller quantization error."""
    bnb_4bit_use_double_quant: Annotated[bool, Field(examples=[True])] = True
    """With `load_in_4bit`: double quantization. The scales are quantized to 8 bits: 4.13 bits per parameter instead of
    4.5."""
    dequantized_layers: Annotated[Literal["auto"] | Annotated[int, Field(ge=0)], Field(examples=["auto"])] = (
        "auto"
    )
    """With `load_in_4bit` or `load_in_8bit`: the number of layers that also store a dequantized copy of their weights
    in the compute dtype, so that no step dequantizes them: faster, with identical results, for 16 more bits per
    parameter. On a GPU, `auto` uses as many layers as fit in memory, if no layer is recomputed."""
    deterministic: Annotated[bool, Field(examples=[False])] = False
    """On a GPU: use deterministic algorithms only, so that a resumed run is bitwise identical to an uninterrupted
    one. Runs on a CPU always are."""

    torch_compile: Annotated[Literal["auto", True, False], Field(examples=["auto"])] = "auto"
    """Compile each layer with torch.compile. The first step then takes some tens of seconds longer, less from the
    second run on (compiled code is cached in the user's cache folder). `auto` does not compile: on top of
    `cuda_graphs` and trimtab's own kernels, compilation gave no speedup in measurements. The choice is recorded in the
    run folder."""

    cuda_graphs: Annotated[Literal["auto", True, False], Field(examples=["auto"])] = "auto"
    """On a CUDA device, capture forward and backward of a microbatch as a CUDA graph and replay it: steps of small
    models, which are bound by launch overhead, take a fraction of the time, with the same memory and identical
    results. `auto` captures if a microbatch takes less than about two seconds, the run supports it, and the memory
    reserved by a capture fits; `true` refuses a run in which it does not fit."""

    logging_steps: Annotated[Count, Field(examples=[10])] = 10
    """Number of steps between two logged training losses."""
    eval_steps: Annotated[Count | None, Field(examples=[100])] = None
    """Number of steps between two evaluations. Default: evaluate only before and after training."""
    eval_on_start: Annotated[bool, Field(examples=[True])] = True
    """Evaluate before the first step too; without it the report has no baseline."""
    early_stopping_patience: Annotated[Count | None, Field(examples=[3])] = None
    """Number of consecutive evaluations without a lower loss after which training stops. The loss is that of the domain
    set (`data.eval.domain`, or the held-out `data.eval_share`), which also selects the best checkpoint. Requires
    `eval_steps`. A checkpoint is saved and the best one kept. The count is part of each checkpoint, so a resumed run
    stops at the same step."""
    early_stopping_threshold: Annotated[float, Field(ge=0, examples=[0.001])] = 0.0
    """With `early_stopping_patience`: the minimum decrease from the lowest loss so far that counts as an
    improvement."""
    save_steps: Annotated[Count | None, Field(examples=[500])] = 500
    """Number of steps between two checkpoints; one is always saved at the end. `null` saves only at the end."""
    save_total_limit: Annotated[Count, Field(examples=[2])] = 2
    """Number of checkpoints to keep: the newest ones, and the best one in addition."""
    report_to: Annotated[Trackers, Field(examples=[["tensorboard"]])] = []
    """Experiment trackers, in addition to the run folder. `wandb` sends metrics to Weights & Biases; nothing is sent
    anywhere unless it is listed here."""

    prompts: Annotated[list[str], Field(examples=[["The derivative of x^2 is"]])] = []
    """Prompts that the model completes before and after training, for the report."""
    probe: Annotated[bool, Field(examples=[True])] = True
    """At each evaluation, score minimal pairs of grammar, transitivity and arithmetic by likelihood."""
    answers_field: Annotated[MathField, Field(examples=["calculus"])] = "math"
    """Area of mathematics of the problems that `answers` counts; `math` is all areas."""
    answers: Annotated[int, Field(ge=0, examples=[100])] = 0
    """Number of held-out problems whose generated answers are checked for exact match before and after training; 0
    disables it."""

    @model_validator(mode="before")
    @classmethod
    def _default_epochs(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("num_train_epochs") is None and data.get("max_steps", -1) == -1:
            data = {**data, "num_train_epochs": 1.0}
        return data

    @model_validator(mode="after")
    def _check_constraints(self) -> Recipe:
        found = find_violations(self)
        if found:
            raise PydanticCustomError("recipe_rules", "{text}", {"text": "; ".join(found), "problems": found})
        return self
