"""A real training step of a planned job, for measurements."""

from __future__ import annotations

import torch

from trimtab import optim
from trimtab.adapt import init_adapters, trained_parameters
from trimtab.adapt.lora import create_dropout_masks
from trimtab.data import Batch
from trimtab.model import init_weights
from trimtab.parallel import Mesh
from trimtab.plan.job import Job
from trimtab.plan.resolved import (
    AttentionConfig,
    LayerAttention,
    LossConfig,
    MemoryPlan,
    OptimizerConfig,
    PointwiseConfig,
    PrecisionConfig,
    Resolved,
)
from trimtab.run.build import build_microstep, build_model, make_dequantized_copies, set_gradient_dtype
from trimtab.trainer.memory import storage_bytes


def resolved_of(job: Job) -> Resolved:
    """The resolved configuration of a job."""
    return Resolved(
        device=job.device,
        threads=torch.get_num_threads(),
        deterministic=False,
        precision=PrecisionConfig(job.dtype, job.weights_dtype, job.gradient_dtype),
        attention=AttentionConfig(tuple(LayerAttention(impl, impl) for impl in job.attention_backends)),
        optimizer=OptimizerConfig(job.optimizer, job.optimizer_impl),
        loss=LossConfig(job.loss_impl, job.loss_memory),
        pointwise=PointwiseConfig(job.pointwise),
        memory=MemoryPlan(job.layer_policies, job.mlp_tiles, job.loss_memory, job.dequantized_layers),
        lora=job.lora,
        quantization=job.quantization,
    )


class Step:
    """A model and optimizer of a job, and one training step."""

    def __init__(self, job: Job) -> None:
        self.job = job
        resolved, mesh = resolved_of(job), Mesh.single()
        self.decoder = init_weights(build_model(job.shape, resolved, mesh), 0)
        make_dequantized_copies(self.decoder, resolved)
        if job.lora is not None:
            init_adapters(self.decoder, seed=0)
            create_dropout_masks(self.decoder, torch.device(job.device))
        set_gradient_dtype(self.decoder, resolved)
        self.parameters = trained_parameters(self.decoder)
        self.microstep = build_microstep(self.decoder, self.parameters, resolved, mesh, packing=job.packed)
        self.optimizer = optim.build(
            job.optimizer,
            self.parameters.items(),
            lr=1e-4,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.01,
            seed=0,
            impl=job.optimizer_impl,
        )
        if job.in_backward:
            self.in_backward = optim.OptimizerInBackward(self.optimizer)
            self.in_backward.begin()

    def forward_backward(self) -> None:
        job = self.job
        for _ in range(job.accumulation):
            ids_BT = torch.randint(0, job.shape.vocab_size, (job.batch, job.tokens))
            positions_BT = torch.arange(job.tokens).expand(job.batch, -1).contiguous()
            documents_BT = (positions_BT >= job.tokens // 2).int()
            origins = [["random"]] * job.batch
            batch = Batch(ids_BT, ids_BT.clone(), positions_BT, documents_BT, ids_BT.numel(), origins)
            self.microstep.backward(batch, 1.0)

    def weights(self) -> int:
        """Bytes of parameters and packed weights."""
        packed = (b for name, b in self.decoder.named_buffers() if "rotary" not in name)
        return storage_bytes([*self.decoder.parameters(), *packed])
