"""Export VITS as the ONNX model that sherpa-onnx reads: its inputs, its metadata, and tokens.txt.

The graph is `VitsModel`'s own, traced for texts of one length, since positions of tokens are sizes
in its attention; durations, and so the length of the speech, are computed in it.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.onnx._internal.torchscript_exporter import onnx_proto_utils
from transformers import AutoTokenizer, VitsModel

from benchmarks.support.cache import made

MODEL, TOKENS = "model.onnx", "tokens.txt"
INPUTS = ("x", "x_length", "noise_scale", "length_scale", "noise_scale_w")
_METADATA_FIELD = 14  # of ModelProto: repeated StringStringEntryProto {1: key, 2: value}


def vits_onnx(folder: Path, text: str) -> Path:
    """Return the exported checkpoint, for texts with as many tokens as this one."""
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    return made(
        folder.with_name(f"{folder.name}.onnx-{ids.shape[1]}"),
        lambda path: _export(folder, ids, path),
    )


class Graph(nn.Module):
    """Compute speech `[1, 1, N]` of token ids `[1, L]`, with the scales as inputs."""

    def __init__(self, model: Any):
        super().__init__()
        self._model = model

    def forward(
        self,
        x: Tensor,
        x_length: Tensor,
        noise_scale: Tensor,
        length_scale: Tensor,
        noise_scale_w: Tensor,
    ) -> Tensor:
        model, kept = self._model, x_length.reshape(1, 1, 1).clamp(max=1).float()
        mask_1L1 = torch.ones_like(x, dtype=torch.float32)[..., None] * kept
        text = model.text_encoder(
            input_ids=x, padding_mask=mask_1L1, attention_mask=None, return_dict=True
        )
        mask_11L = mask_1L1.transpose(1, 2)
        log_11L = model.duration_predictor(
            text.last_hidden_state.transpose(1, 2),
            mask_11L,
            None,
            reverse=True,
            noise_scale=noise_scale_w,
        )
        ends_1L = (log_11L.exp() * length_scale).ceil()[:, 0].cumsum(-1)
        frames_T = torch.arange(ends_1L[0, -1].long())
        token_T = (ends_1L[0][None] <= frames_T[:, None]).sum(-1)
        means_1FT = text.prior_means[:, token_T].transpose(1, 2)
        deviations_1FT = text.prior_log_variances[:, token_T].transpose(1, 2).exp()
        prior_1FT = means_1FT + torch.randn_like(means_1FT) * deviations_1FT * noise_scale
        mask_11T = torch.ones_like(prior_1FT[:, :1])
        return model.decoder(model.flow(prior_1FT, mask_11T, None, reverse=True), None)


def _export(folder: Path, ids_1L: Tensor, path: Path) -> None:
    model: Any = VitsModel.from_pretrained(folder).eval()
    path.mkdir()
    one = torch.ones(1)
    # The exporter's last pass looks for functions of custom operators, with a package that we do not need otherwise.
    last_pass = mock.patch.object(onnx_proto_utils, "_add_onnxscript_fn", lambda proto, _: proto)
    with warnings.catch_warnings(), torch.inference_mode(), last_pass:
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Graph(model), (ids_1L, torch.tensor([ids_1L.shape[1]]), one, one, one), str(path / MODEL),
            input_names=[*INPUTS], output_names=["y"], opset_version=17, dynamo=False,
        )  # fmt: skip
    vocab: dict[str, int] = json.loads((folder / "vocab.json").read_text())
    metadata = {
        "model_type": "vits", "comment": "mms-tts", "language": "English", "frontend": "characters",
        "add_blank": 1, "blank_id": vocab["_"], "use_eos_bos": 0, "n_speakers": 1,
        "sample_rate": model.config.sampling_rate,
    }  # fmt: skip
    with (path / MODEL).open("ab") as file:  # messages that follow each other are one message
        file.writelines(_entry(key, str(value)) for key, value in metadata.items())
    lines = (f"{token} {number}\n" for token, number in vocab.items())
    (path / TOKENS).write_text("".join(lines))


def _entry(key: str, value: str) -> bytes:
    """Return one entry of the metadata; its texts are shorter than 64 bytes."""
    body = b"".join(
        bytes([number << 3 | 2, len(text)]) + text
        for number, text in ((1, key.encode()), (2, value.encode()))
    )
    return bytes([_METADATA_FIELD << 3 | 2, len(body)]) + body
