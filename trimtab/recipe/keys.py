"""The recipe: everything a person may ask of a run, typed, with its documentation beside each key.

Names are Hugging Face's where Hugging Face has one. The text under a field is its description: the reference
page and the JSON schema that editors complete from are made from it. Types are strict: `yes` is a word and
not a boolean, `abc` is not a number, `1` and `2e-5` both are.
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
from trimtab.recipe.rules import problems

Attention = Literal[
    "auto", "reference", "sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "varlen", "flex", "triton"
]
Optimizer = Literal["adamw_torch", "adamw_torch_fused", "adamw_bf16", "adamw_8bit"]
OptimizerCode = Literal["auto", "reference", "triton", "triton_exact"]
Schedule = Literal["cosine", "linear", "constant", "constant_with_warmup", "warmup_stable_decay"]
Documents = Literal["file", "blank-lines", "lines"]
RowFormat = Literal["auto", "text", "messages", "sharegpt", "prompt-completion", "alpaca"]
TrainOn = Literal["completions", "last", "all"]
BadRows = Literal["stop", "skip"]
MathField = Literal["math", "arithmetic", "algebra", "calculus"]
Tracker = Literal["tensorboard", "wandb"]
Policy = Literal["none", "pointwise", "selective", "block", "offload_half", "offload_attention", "offload"]


def _usable_name(text: str | None, *, names_text: bool = False) -> str | None:
    """A text that can name a file, a folder or a repository."""
    wrong = None if text is None else unusable_name(text, names_text=names_text)
    if wrong is not None:
        raise PydanticCustomError("unusable_name", "{cause}", {"cause": wrong[0], "remedy": wrong[1]})
    return text


def _usable_source(text: str) -> str | None:
    return _usable_name(text, names_text=True)


Usable = AfterValidator(_usable_name)
UsableSource = AfterValidator(_usable_source)
TorchNames = BeforeValidator(dtype_alias)
Count = Annotated[int, Field(ge=1)]
Device = Literal["auto", "cpu", "cuda"] | Annotated[str, Field(pattern=r"^cuda:(0|[1-9][0-9]{0,3})$")]
Share = Annotated[float, Field(gt=0, lt=1)]
Rank = Annotated[int, Field(ge=1, lt=2**31)]
Strength = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """What all parts of a recipe have in common: strict types, no unknown keys, no change after loading."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        # Hugging Face's own names must stay usable: `model.name`, `model_…`.
        protected_namespaces=(),
    )


class Shorthand(Section):
    """A section that may be written as one word, which then is its main key."""

    @classmethod
    def main_key(cls) -> str:
        """The key that the one word stands for."""
        return next(iter(cls.model_fields))

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        return {cls.main_key(): data} if isinstance(data, str) else data

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler(core)]}


class Model(Shorthand):
    """Which model is trained. `model: NAME` alone is short for `model: {name: NAME}`."""

    name: Annotated[
        str, Field(min_length=1, examples=["Qwen/Qwen3-0.6B-Base", "./my-model", "model.gguf"]), Usable
    ]
    """A hub id, a Hugging Face folder (config.json and safetensors), a GGUF file, a run folder that trained every
    weight (its latest checkpoint; or `RUN/checkpoints/best`, `RUN/checkpoints/step-…`), or `starter` for the small
    model that ships with trimtab."""
    revision: Annotated[str | None, Field(examples=["main"])] = None
    """Branch, tag or commit on the hub. The commit that it names at first use is kept with the run."""
    tokenizer: Annotated[str | None, Field(min_length=1, examples=["./my-tokenizer"]), Usable] = None
    """Folder, hub id or GGUF file of another tokenizer. By default the model's own."""
    chat_template: Annotated[str | None, Field(min_length=1, examples=["./chat.jinja"])] = None
    """Jinja file with a chat template, or the template itself, instead of the tokenizer's own. It is kept with the run
    and goes into its exports. Needed to train on conversations where the tokenizer has none."""
    attn_implementation: Annotated[Attention, Field(examples=["auto"])] = "auto"
    """The attention that runs. `auto` chooses once, says which and why, and keeps the choice with the run; a
    named one that cannot serve the job is an error and is never replaced."""
    added_tokens: Annotated[list[str], Field(examples=[["<|tool|>", "<|answer|>"]])] = []
    """Tokens that the tokenizer gets besides its own. The embedding grows where it has no rows to spare; new rows
    start as the mean of the others. With `lora` they are trained by naming `embed_tokens`, and `lm_head` where the
    model has one of its own, in `lora.modules_to_save`."""
    init: Annotated[Literal["pretrained", "random"], Field(examples=["pretrained"])] = "pretrained"
    """`random` takes only the shape and the tokenizer from the model, and starts from fresh weights."""


class Source(Shorthand):
    """A place with text. `PATH` alone is short for `{source: PATH}`."""

    source: Annotated[
        str, Field(min_length=1, examples=["./notes", "data/*.jsonl", "org/dataset"]), UsableSource
    ]
    """A file (text, Markdown, JSON lines, Parquet, CSV), a folder, a glob, a hub dataset id, or what ships
    with trimtab: `starter:math`, `starter:math-heldout`, `starter:chat` (conversations), `starter:general`,
    `starter:replay`. A relative path counts from the folder in which trimtab is called, not from the recipe's."""
    split: Annotated[str, Field(min_length=1, examples=["train"])] = "train"
    """Split of a hub dataset."""
    config: Annotated[str | None, Field(examples=["wikitext-2-raw-v1"])] = None
    """Configuration of a hub dataset that has several."""
    revision: Annotated[str | None, Field(examples=["main"])] = None
    """Branch, tag or commit on the hub. The commit that it names at first use is kept with the run."""
    text_column: Annotated[str | None, Field(examples=["text"])] = None
    """Column or JSON key that holds the text. By default it is found; where that is not possible, the error
    lists the columns."""
    format: Annotated[RowFormat, Field(examples=["messages"])] = "auto"
    """What a row of a table is: a `text`; a conversation under `messages` or, as ShareGPT has it, under
    `conversations` (`sharegpt`); `prompt-completion`, two strings or two lists of messages; or `alpaca`, with
    `instruction`, `input` and `output`. `auto` tells it by the columns of the first row, and says which it took."""
    columns: Annotated[dict[str, str], Field(examples=[{"instruction": "question", "output": "answer"}])] = {}
    """Where the parts of a row stand if not under their own names: part to column. The parts are `messages`,
    `conversations`, `prompt`, `completion`, `instruction`, `input`, `output`, `system` and `tools`."""
    train_on: Annotated[TrainOn, Field(examples=["completions"])] = "completions"
    """Of conversations and other examples, what is trained on: `completions` is every answer with the token that ends
    it, `last` the last answer only, `all` every token. Texts are always trained on whole."""
    bad_rows: Annotated[BadRows, Field(examples=["skip"])] = "stop"
    """What becomes of a row that is no example of the source's format, or that the chat template refuses: `stop`
    before training with its place, or `skip` it and say how many there were."""
    first: Annotated[Count | None, Field(examples=[10_000])] = None
    """Take only so many documents, from the beginning. By default all."""
    documents: Annotated[Documents, Field(examples=["lines"])] = "file"
    """How a text file becomes documents: whole, cut at `blank-lines`, or one a line (`lines`). Tables have
    one document a row."""
    weight: Annotated[float, Field(gt=0, examples=[2.0])] = 1.0
    """How often the source is seen in an epoch: 1 is once, 2 twice, 0.5 half of it; at most 1000."""


def _as_list(data: Any) -> Any:
    """One source where a list is expected is a list of one."""
    return [data] if isinstance(data, str | dict) else data


def _trackers(data: Any) -> Any:
    """`report_to: none` and `report_to: wandb`, as Hugging Face writes them."""
    return ([] if data == "none" else [data]) if isinstance(data, str) else data


Sources = Annotated[list[Source], BeforeValidator(_as_list, json_schema_input_type=Source | list[Source])]
Trackers = Annotated[
    list[Tracker],
    BeforeValidator(_trackers, json_schema_input_type=Literal["none"] | Tracker | list[Tracker]),
]


class Replay(Section):
    """General text mixed into the training data, so that a model does not forget what it could do."""

    share: Annotated[Share, Field(examples=[0.1])] = 0.1
    """Share of the windows that is replayed text: above 0, below 1. Beside conversations, of which not every token is
    trained on, it is a larger share of what is learnt."""
    sources: Annotated[Sources, Field(min_length=1, examples=[["./general-text"]])]
    """Where the replayed text comes from."""


class Evaluation(Section):
    """Text on which loss is measured before, during and after training; never trained on."""

    domain: Annotated[Sources, Field(examples=[["./heldout-math"]])] = []
    """Text like the training text: it shows what is gained. The best checkpoint is chosen on it. Without it a
    share of the training text is held out (`data.eval_share`)."""
    general: Annotated[Sources, Field(examples=[["starter:general"]])] = []
    """Text unlike the training text: it shows what is forgotten."""


class Data(Section):
    """What is trained on and what is measured on."""

    train: Annotated[Sources, Field(min_length=1, examples=[["./notes", "data/*.jsonl"]])]
    """The training text: one source or a list of them."""
    replay: Annotated[Replay | None, Field(examples=[{"share": 0.1, "sources": ["./general-text"]}])] = None
    """General text to mix in. By default none."""
    eval: Evaluation = Evaluation()
    """What is measured on."""
    eval_share: Annotated[float, Field(ge=0, lt=1, examples=[0.01])] = 0.01
    """Share of the training documents that is held out for measuring, when `data.eval.domain` names nothing.
    0 holds out none; with `data.streaming` none can be held out, and `data.eval.domain` is the only way."""
    eval_windows: Annotated[Count, Field(examples=[64])] = 64
    """At most so many windows of `max_seq_length` tokens are measured in each set at each evaluation."""
    streaming: Annotated[bool, Field(examples=[False])] = False
    """Read and tokenize while training instead of preparing a token cache first. The number of steps is then
    unknown beforehand, so `max_steps` is needed."""
    chat_template_kwargs: Annotated[
        dict[str, str | int | float | bool], Field(examples=[{"enable_thinking": False}])
    ] = {}
    """What the chat template is told besides the messages; which names it knows, its model's card says."""
    cache_dir: Annotated[str | None, Field(min_length=1, examples=["~/.cache/trimtab/tokens"]), Usable] = None
    """Folder of the token cache. By default the user's cache folder."""
    num_proc: Annotated[Count | None, Field(examples=[8])] = None
    """Processes that tokenize. By default one for each core."""


class Lora(Section):
    """Train low-rank adapters and leave the model's own weights as they are. Names are peft's."""

    r: Annotated[Rank, Field(examples=[16])] = 16
    """Rank: each adapted matrix gets two thin ones, of `r` columns and `r` rows."""
    lora_alpha: Annotated[Strength, Field(examples=[32])] = 32
    """Strength: what the thin matrices add is multiplied by `lora_alpha / r`."""
    target_modules: Annotated[
        str | list[str], Field(min_length=1, examples=["all-linear", ["q_proj", "v_proj"]])
    ] = "all-linear"
    """Which modules are adapted: `all-linear` for every linear layer of the blocks, a list of names (`q_proj`, or
    whole ones), or a regular expression over whole names (`model.layers.0.self_attn.q_proj`)."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1, examples=[0.05])] = 0.0
    """Share of an adapter's inputs that is dropped while training. Masks follow from the seed, so that resuming and
    recomputing repeat them."""
    use_rslora: Annotated[bool, Field(examples=[True])] = False
    """Multiply by `lora_alpha / √r` instead, which keeps high ranks learning."""
    use_dora: Annotated[bool, Field(examples=[True])] = False
    """Learn the length of each row apart from its direction (DoRA): often better at low ranks, and slower."""
    rank_pattern: Annotated[dict[str, Rank], Field(examples=[{"down_proj": 32}])] = {}
    """Other ranks for some modules, by name or regular expression."""
    alpha_pattern: Annotated[dict[str, Strength], Field(examples=[{"down_proj": 64}])] = {}
    """Other strengths for some modules, by name or regular expression."""
    modules_to_save: Annotated[list[str], Field(examples=[["embed_tokens", "lm_head"]])] = []
    """Modules trained as a whole, in the model's own number format: embeddings and head for new tokens, norms."""
    dtype: Annotated[Literal["fp32", "bf16"], TorchNames, Field(examples=["fp32"])] = "fp32"
    """Number format in which adapters are kept. Products run in the recipe's `dtype` either way."""
    adapter: Annotated[str | None, Field(min_length=1, examples=["./my-adapter"]), Usable] = None
    """Start from this adapter, a folder that peft or `trimtab export peft` wrote, instead of a fresh one. Its rank,
    modules and all else then come from it, and no other key may be given here."""


class Recipe(Section):
    """A training run: model, data and how one meets the other."""

    model: Annotated[Model, Field(examples=["Qwen/Qwen3-0.6B-Base"])]
    """The model to train."""
    data: Data
    """The text to train on and to measure on."""

    lora: Annotated[Lora | None, Field(examples=[{"r": 16, "lora_alpha": 32}])] = None
    """Train low-rank adapters instead of every weight. `lora: {}` takes the defaults."""

    output_dir: Annotated[str, Field(min_length=1, examples=["runs/my-run"]), Usable] = "runs/train"
    """The run folder: recipe, plan, metrics, checkpoints and report go there. By default `runs/` and the name
    of the recipe file."""
    seed: Annotated[int, Field(ge=0, lt=2**63, examples=[42])] = 42
    """Everything random follows from it: order of the data, rounding, fresh weights."""

    max_seq_length: Annotated[int, Field(ge=4, examples=[1024])] = 1024
    """Tokens per sequence. By default 1024, or what the model has positions for if that is less."""
    packing: Annotated[bool, Field(examples=[True])] = True
    """Fill each window with several documents, none of which sees another. Without it each window holds one
    document and padding."""
    group_by_length: Annotated[bool, Field(examples=[False])] = False
    """With `packing: false`: put documents of similar length into the same microbatch and pad it to its own longest
    document, rounded up to a multiple of 8, instead of to `max_seq_length`. Documents are shuffled first and sorted by
    length within mega-batches of 50 steps, then the microbatches are shuffled, so the order stays random and follows
    from the seed. Memory is planned for the longest microbatch; microbatches of many lengths rule out CUDA graphs."""
    per_device_train_batch_size: Annotated[Count, Field(examples=[4])] = 4
    """Windows that pass through the model at once on each device. Activation memory grows with it."""
    gradient_accumulation_steps: Annotated[Count, Field(examples=[4])] = 4
    """Passes whose gradients are added before the weights move. 1×16, 4×4 and 16×1 train the same."""
    num_train_epochs: Annotated[float | None, Field(gt=0, le=1e6, examples=[1.0])] = None
    """Times through the training data. By default 1, unless `max_steps` is given."""
    max_steps: Annotated[int, Field(ge=-1, le=10**12, examples=[1000])] = -1
    """Updates of the weights, instead of `num_train_epochs`; -1 counts in epochs."""

    learning_rate: Annotated[float, Field(gt=0, examples=[2e-5])] = 2e-5
    """The highest learning rate of the schedule."""
    embedding_learning_rate: Annotated[float | None, Field(gt=0, examples=[2e-6])] = None
    """The highest learning rate of embeddings and head, where they are trained; the schedule is the same. By default
    `learning_rate`."""
    lr_scheduler_type: Annotated[Schedule, Field(examples=["cosine"])] = "linear"
    """How the learning rate falls from its highest value."""
    warmup_steps: Annotated[int, Field(ge=0, examples=[20])] = 0
    """Steps in which the learning rate rises from zero; or `warmup_ratio`, not both."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1, examples=[0.03])] = 0.0
    """Share of all steps in which the learning rate rises from zero; or `warmup_steps`, not both."""
    min_lr_ratio: Annotated[float, Field(ge=0, lt=1, examples=[0.1])] = 0.0
    """Where the learning rate ends, as a share of the highest."""

    optim: Annotated[Optimizer, Field(examples=["adamw_8bit"])] = "adamw_torch"
    """The optimizer. Bytes of state for each weight: `adamw_torch` 8, `adamw_bf16` 4, `adamw_8bit` about 2;
    these round bf16 weights stochastically. `adamw_torch_fused` is torch's own kernel: states as wide as the
    weights (8 bytes with fp32, 4 with bf16), bf16 weights rounded to nearest, so small updates are lost."""
    optim_implementation: Annotated[OptimizerCode, Field(examples=["auto"])] = "auto"
    """Which code steps `adamw_8bit`: `reference` is torch's operations on any device, `triton` one kernel for all
    weights on a CUDA GPU, `triton_exact` the same with the reference's bits, slower. `auto` chooses once, says
    which, and keeps the choice with the run. The states are the same for all."""
    optim_in_backward: Annotated[bool, Field(examples=[False])] = False
    """Update each weight inside the backward pass, as soon as its gradient is complete, and free the gradient.
    Then gradients take almost no memory; they can neither be clipped by their common norm nor added up over
    several passes, so this needs `max_grad_norm: 0` and `gradient_accumulation_steps: 1`."""
    weight_decay: Annotated[float, Field(ge=0, examples=[0.01])] = 0.01
    """Decoupled decay: each step shrinks the weights by `learning_rate × weight_decay`."""
    decay_all: Annotated[bool, Field(examples=[False])] = False
    """Decay norms and biases too. By default they are left out, as in Hugging Face's trainer."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1, examples=[0.9])] = 0.9
    """Memory of AdamW's first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1, examples=[0.95])] = 0.999
    """Memory of AdamW's second moment."""
    adam_epsilon: Annotated[float, Field(gt=0, examples=[1e-8])] = 1e-8
    """Added to AdamW's denominator."""
    max_grad_norm: Annotated[float, Field(ge=0, examples=[1.0])] = 1.0
    """Longer gradients are scaled down to this norm; 0 leaves them as they are."""
    label_smoothing_factor: Annotated[float, Field(ge=0, lt=1, examples=[0.1])] = 0.0
    """Share of each target that is spread evenly over the vocabulary while training (label smoothing), as in
    `torch.nn.functional.cross_entropy`. The training loss includes it; evaluation losses stay plain cross-entropy."""
    z_loss: Annotated[float, Field(ge=0, lt=1, examples=[1e-4])] = 0.0
    """Coefficient of the z-loss: this times the squared log-sum-exp of each token's logits is added to the training
    loss, which keeps logits from drifting (PaLM uses 1e-4). Evaluation losses stay plain cross-entropy."""

    device: Annotated[Device, Field(examples=["auto", "cpu", "cuda", "cuda:1"])] = "auto"
    """Where to train. `auto` uses a CUDA GPU if there is one. `cuda:1` is the second visible GPU, `cuda` the
    current one (the first, unless the process chose another). A resumed run may continue on another GPU."""
    num_threads: Annotated[Count | None, Field(le=1024, examples=[8])] = None
    """CPU threads of torch's operations (`torch.set_num_threads`); takes precedence over `OMP_NUM_THREADS`. By default
    torch decides: `OMP_NUM_THREADS`, or one thread per core. The number is kept with the run: another one may add up
    sums in another order and so change the last bits of the losses."""
    dtype: Annotated[Literal["auto", "fp32", "bf16", "fp16"], TorchNames, Field(examples=["bf16"])] = "auto"
    """Number format of the arithmetic. `auto` takes bf16 where the device computes it in hardware, fp32
    elsewhere. Here and in the other keys for number formats, torch's names (`bfloat16`, `float16`, `float32`) are
    accepted too."""
    weights_dtype: Annotated[Literal["auto", "fp32", "bf16"], TorchNames, Field(examples=["bf16"])] = "auto"
    """Number format in which weights are kept. `auto` follows `dtype`: bf16 for bf16 (updates are rounded
    stochastically, so that small ones are not lost), fp32 for fp32 and fp16."""
    gradient_dtype: Annotated[Literal["fp32", "bf16"], TorchNames, Field(examples=["fp32"])] = "fp32"
    """Number format in which gradients are added up. bf16 takes half the memory and loses some precision; it
    needs weights in bf16."""
    memory_limit: Annotated[str | None, Field(examples=["24GiB", "80%"])] = None
    """The most memory the run may take on its device, its CUDA context included: a size (`24GiB` is 24 × 2³⁰ bytes,
    `24GB` is 24 × 10⁹; in any case, also `24gb`, `24 GB`, `24G`) or a share of the device (`80%`). By default what is
    free when it starts. On a GPU the allocator is held to it."""
    recompute: Annotated[
        Literal["auto"] | Policy | list[Policy] | dict[Policy, Annotated[int, Field(ge=0)]],
        Field(examples=["auto", "selective", {"block": 20, "none": 8}]),
    ] = "auto"
    """What each layer keeps for the backward pass, and what it computes again: `none` keeps all; `pointwise` computes
    norms, rotary positions and gates again; `selective` all but attention; `block` everything from the layer's input;
    `offload` the same, and the input waits in the host's memory; `offload_attention` all but attention, and
    `offload_half` the feed-forward half alone, and what is kept waits there. One word for all layers, a list with one
    for each, or how many layers have which (the others have none). `auto` takes the fastest that fits `memory_limit`,
    says which, and keeps the choice with the run. The numbers are the same with all of them."""
    gradient_checkpointing: Annotated[bool | None, Field(examples=[True])] = None
    """The familiar name: `true` is `recompute: block`, `false` is `recompute: none`."""
    mlp_tiles: Annotated[Literal["auto"] | Count, Field(examples=["auto", 8])] = "auto"
    """Parts of the tokens that each layer's feed-forward half is computed in, for very long windows: its activations
    then never exist whole. 1 computes it at once; `auto` takes as few as fit."""
    load_in_4bit: Annotated[bool, Field(examples=[False])] = False
    """Keep the blocks' weights frozen in 4 bits (NF4, as bitsandbytes has it) and train adapters on them: QLoRA. Needs
    `lora`. Weights are quantized while they are read; files that bitsandbytes quantized are taken as they are."""
    load_in_8bit: Annotated[bool, Field(examples=[False])] = False
    """The same in 8 bits, with one scale for each row: twice the memory of 4 bits, closer to the original."""
    bnb_4bit_use_double_quant: Annotated[bool, Field(examples=[True])] = True
    """With `load_in_4bit`: keep the scales in 8 bits too, 4.13 bits for each weight instead of 4.5."""
    unpacked_layers: Annotated[Literal["auto"] | Annotated[int, Field(ge=0)], Field(examples=["auto"])] = (
        "auto"
    )
    """With `load_in_4bit` or `load_in_8bit`: in how many layers weights are kept unpacked as well, in the format of the
    arithmetic, so that no step has to unpack them: faster, with the same numbers, for 16 bits more a weight. `auto`
    does so on a GPU for as many layers as fit where every layer keeps everything and memory is still left."""
    deterministic: Annotated[bool, Field(examples=[False])] = False
    """On a GPU: only algorithms that give the same bits each time, so that a resumed run equals an
    uninterrupted one bit by bit. On a CPU it always does."""

    torch_compile: Annotated[Literal["auto", True, False], Field(examples=["auto"])] = "auto"
    """Compile each layer with torch.compile: faster steps after a first one that takes some tens of seconds longer,
    less from the second run on (compiled code is kept in the user's cache folder). `auto` does not compile: beside
    `cuda_graphs` and this library's own kernels it was measured to gain nothing. The choice is kept with the run."""

    cuda_graphs: Annotated[Literal["auto", True, False], Field(examples=["auto"])] = "auto"
    """On a CUDA device, record forward and backward of a microbatch once and hand them to the GPU in one launch: small
    models then take a fraction of the time, in the same memory, with the same numbers. `auto` does it where a
    microbatch takes less than about two seconds and nothing stands against it."""

    logging_steps: Annotated[Count, Field(examples=[10])] = 10
    """Write the training loss every so many steps."""
    eval_steps: Annotated[Count | None, Field(examples=[100])] = None
    """Measure every so many steps. By default only before and after training."""
    eval_on_start: Annotated[bool, Field(examples=[True])] = True
    """Measure before the first step too; without it there is no "before" in the report."""
    early_stopping_patience: Annotated[Count | None, Field(examples=[3])] = None
    """Stop after so many evaluations in a row that did not lower the loss on the domain set (`data.eval.domain`, or the
    held-out `data.eval_share`), the loss that also decides the best checkpoint. Needs `eval_steps`. The state is saved
    and the best checkpoint kept. The count is part of each checkpoint, so a resumed run stops at the same step."""
    early_stopping_threshold: Annotated[float, Field(ge=0, examples=[0.001])] = 0.0
    """With `early_stopping_patience`: an evaluation counts as better only if its loss is lower than the lowest before
    it by more than this."""
    save_steps: Annotated[Count | None, Field(examples=[500])] = 500
    """Save a checkpoint every so many steps, and always at the end. `null` saves only at the end."""
    save_total_limit: Annotated[Count, Field(examples=[2])] = 2
    """Keep the newest so many checkpoints, and the best one besides."""
    report_to: Annotated[Trackers, Field(examples=[["tensorboard"]])] = []
    """Where metrics go besides the run folder. `wandb` sends them to Weights & Biases; nothing is sent
    anywhere unless it is named here."""

    prompts: Annotated[list[str], Field(examples=[["The derivative of x^2 is"]])] = []
    """Beginnings that the model continues before and after training, for the report."""
    probe: Annotated[bool, Field(examples=[True])] = True
    """Score grammar, transitivity and arithmetic by likelihood at each evaluation."""
    answers_field: Annotated[MathField, Field(examples=["calculus"])] = "math"
    """Which problems those of `answers` are: all of mathematics, or one field of it."""
    answers: Annotated[int, Field(ge=0, examples=[100])] = 0
    """Number of held-out problems whose generated answers are checked before and after training; 0 for
    none."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("num_train_epochs") is None and data.get("max_steps", -1) == -1:
            data = {**data, "num_train_epochs": 1.0}
        return data

    @model_validator(mode="after")
    def _together(self) -> Recipe:
        found = problems(self)
        if found:
            raise PydanticCustomError("recipe_rules", "{text}", {"text": "; ".join(found), "problems": found})
        return self
