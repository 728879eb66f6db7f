"""Compare a finished job with the greedy tokens and log-probabilities of `transformers.generate`."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from support.engine.schedules import Job

TIE = 1e-4


@torch.inference_mode()
def assert_greedy(reference: PreTrainedModel, job: Job) -> None:
    """`job.ids` is what `generate` gives, ties apart, and its log-probabilities are the reference's."""
    eos = reference.generation_config.eos_token_id
    stop = eos[:1] if isinstance(eos, list) else [eos]
    ours = job.ids + (stop if job.finish == "stop" else [])
    logits: list[torch.Tensor] = []
    while len(logits) < len(ours):
        made = len(logits)
        forget_lengths(reference)
        prompt = torch.tensor([job.prompt + ours[:made]])
        result = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=len(ours) - made,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        theirs = result.sequences[0, prompt.shape[1] :].tolist()
        same = next(
            (i for i, (a, b) in enumerate(zip(theirs, ours[made:], strict=False)) if a != b),
            len(theirs),
        )
        logits += [step[0].float() for step in result.logits[: same + 1]]
        if same < len(theirs):
            best = logits[-1].topk(2)
            assert best.indices[1] == ours[made + same]
            assert best.values[0] - best.values[1] < TIE
    expected = [
        float(row.log_softmax(-1)[token]) for row, token in zip(logits, job.ids, strict=False)
    ]
    assert job.logprobs == pytest.approx(expected, abs=1e-4)
    assert job.finish == "stop" or len(job.ids) == job.sampling.max_tokens


def forget_lengths(reference: PreTrainedModel) -> None:
    """Undo what earlier calls left in rotary embeddings that grow with the longest sequence seen."""
    for module in reference.modules():
        if hasattr(module, "max_seq_len_cached") and hasattr(module, "original_inv_freq"):
            module.max_seq_len_cached = module.original_max_seq_len
            module.inv_freq = module.original_inv_freq.clone()
