"""A training step as a plan describes it, to be looked at."""

from __future__ import annotations

import torch

from trimtab import optim
from trimtab.adapt import (
    add_adapters,
    init_adapters,
    keep_unpacked,
    quantize_layout,
    recompute,
    trained_parameters,
)
from trimtab.adapt.lora import set_masks
from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.kernels.attention import Layout
from trimtab.model import build, init_weights
from trimtab.plan.job import Job
from trimtab.trainer.memory import storage_bytes


class Step:
    """A model and optimizer of a job, and one training step."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.decoder = build(
            job.shape,
            dtype=job.weights_dtype,
            device=job.device,
            attention=job.attention,
            loss_impl=job.loss_impl,
            loss_memory=job.loss_memory,
            pointwise=job.pointwise,
        )
        init_weights(self.decoder, 0)
        if job.quantization is not None:
            quantize_layout(self.decoder, job.quantization["kind"])
            keep_unpacked(self.decoder, job.unpacked_layers, dtype=getattr(torch, TORCH_NAMES[job.dtype]))
        if job.lora is not None:
            add_adapters(self.decoder, job.lora)
            init_adapters(self.decoder, seed=0)
            set_masks(self.decoder, torch.device(job.device))
        recompute.apply(self.decoder, job.layers, mlp_tiles=job.mlp_tiles)
        for p in self.decoder.parameters():
            if p.requires_grad and p.dtype != torch.float32 and job.gradient_dtype == "fp32":
                p.grad_dtype = getattr(torch, TORCH_NAMES[job.gradient_dtype])
        self.parameters = trained_parameters(self.decoder)
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
            self.in_backward = optim.InBackward(self.optimizer)
            self.in_backward.begin()

    def forward_backward(self) -> None:
        job = self.job
        for _ in range(job.accumulation):
            ids_BT = torch.randint(0, job.shape.vocab_size, (job.batch, job.tokens), device=job.device)
            positions_BT = torch.arange(job.tokens, device=job.device).expand(job.batch, -1).contiguous()
            documents_BT = (positions_BT >= job.tokens // 2).int()
            mixed = job.dtype != job.weights_dtype
            with torch.autocast(job.device, torch.bfloat16, enabled=mixed, cache_enabled=False):
                layout = Layout.packed(documents_BT) if job.packed else Layout.causal()
                loss = self.decoder.loss(ids_BT, ids_BT.clone(), positions_BT, layout)
            loss.backward()
            del loss

    def weights(self) -> int:
        """Bytes of parameters and packed weights."""
        packed = (b for name, b in self.decoder.named_buffers() if "rotary" not in name)
        return storage_bytes([*self.decoder.parameters(), *packed])
