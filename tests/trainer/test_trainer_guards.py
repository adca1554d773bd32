"""Which documents the error for a non-finite step names."""

from __future__ import annotations

import torch

from trimtab.trainer.guards import NonFiniteHooks, bad_documents

DOCUMENTS_BT = torch.tensor([[0, 0, 1, 1, 2, -1], [0, 0, 0, 1, 1, -1]], dtype=torch.int32)
ORIGINS = [["a", "b", "c"], ["d", "e"]]


def watched(ids_BT: torch.Tensor, documents_BT: torch.Tensor | None) -> NonFiniteHooks:
    """A model whose token 7 has an embedding of NaN, then a layer that spreads it over the row, as a mask does."""

    class Spread(torch.nn.Module):
        def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
            return x_BTC + 0 * x_BTC.sum(1, keepdim=True)

    embedding = torch.nn.Embedding(8, 4)
    with torch.no_grad():
        embedding.weight[7, 2] = torch.nan
    model = torch.nn.Sequential(embedding, Spread(), torch.nn.Linear(4, 4))
    with NonFiniteHooks(model, documents_BT) as watch:
        model(ids_BT)
    return watch


def test_the_documents_of_bad_tokens_are_named() -> None:
    ids_BT = torch.zeros(2, 6, dtype=torch.int64)
    ids_BT[0, 2] = ids_BT[1, 4] = 7
    watch = watched(ids_BT, DOCUMENTS_BT)
    assert watch.first == "0"
    assert bad_documents(ORIGINS, watch.documents) == ["b", "e"]


def test_without_a_token_dimension_all_documents_are_named() -> None:
    ids_BT = torch.full((2, 6), 7)
    assert bad_documents(ORIGINS, watched(ids_BT, None).documents) == ["a", "b", "c", "d", "e"]
    padding_BT = torch.zeros(2, 6, dtype=torch.int64)
    padding_BT[0, 5] = 7  # bad, and of no document
    assert bad_documents(ORIGINS, watched(padding_BT, DOCUMENTS_BT).documents) == ["a", "b", "c", "d", "e"]
