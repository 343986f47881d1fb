"""Start-up check of a split: its first layers give the logits that they give in one piece.

The probe of :mod:`common.model.probe` compares attention within the split model, so it cannot see a part that the plan
of an architecture leaves whole, or splits wrongly. Here rank 0 loads the first layers whole, with embedding and output
layer, and compares.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from common.attention.interface import ATTENTION, bind
from common.checkpoint.files import Checkpoint
from common.core.errors import StartError
from common.kv.storage.tensors import DTYPES
from common.model.collective import Collective
from common.model.load import quiet_transformers
from common.model.parallel import load_share
from common.model.probe import PROBE_TOKENS, TOLERANCE, Recorder, deviation, forward, probe_tokens

LAYERS = 2
_CPU = torch.device("cpu")


@torch.inference_mode()
def check_split(
    checkpoint: Checkpoint,
    dtype: str,
    collective: Collective,
    trust_remote_code: bool = False,
    where: torch.device = _CPU,
) -> str:
    """Compare on ``where`` the first layers, split, with the same layers in one piece; every rank has to call it.
    Return a note on what was compared, or why nothing could be. StartError on rank 0 if the logits differ, and on a
    rank whose GPU has too little memory for these layers."""
    try:
        config = _shortened(
            quiet_transformers().AutoConfig.from_pretrained(
                checkpoint.model_directory, trust_remote_code=trust_remote_code, local_files_only=True
            )
        )
        split, plan = load_share(checkpoint, dtype, collective, trust_remote_code, config)
        logits = _logits(split.to(where), checkpoint)
        if collective.rank:
            return ""
        expected = _logits(load_whole(checkpoint, dtype, config, trust_remote_code).to(where), checkpoint)
    except torch.OutOfMemoryError as error:  # not the same on every rank
        raise StartError(
            f"too little GPU memory for {LAYERS} layers on {where}", str(error).partition("\n")[0], "free the GPU"
        ) from None
    except Exception as error:  # a model's own code may raise anything when it is cut short: the same on every rank
        return f"the split was not compared with the whole model: {type(error).__name__}: {str(error)[:200]}"
    off = deviation(logits, expected)
    if not off <= TOLERANCE[expected.dtype]:
        raise plan.refused(
            f"its first {LAYERS} layers, split, give logits that are off by {off:.2g} standard deviations"
        )
    return f"the first {LAYERS} layers give the same logits in {collective.size} ranks as in one"


def load_whole(checkpoint: Checkpoint, dtype: str, config: Any, trust_remote_code: bool) -> Any:
    """Return the model that ``config`` describes, in one piece."""
    model: Any = quiet_transformers().AutoModelForCausalLM.from_pretrained(
        checkpoint.model_directory, config=config, dtype=DTYPES[dtype], attn_implementation=ATTENTION,
        trust_remote_code=trust_remote_code, local_files_only=True,
    )  # fmt: skip
    return model.eval()


def _shortened(config: Any) -> Any:
    """Return a copy of a configuration with the first layers only."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    count = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == count:
            setattr(text, name, value[:LAYERS])
    text.num_hidden_layers = min(count, LAYERS)
    return short


def _logits(model: Any, checkpoint: Checkpoint) -> torch.Tensor:
    bind(model, Recorder())
    where = model.get_input_embeddings().weight.device
    ids, positions = torch.tensor([probe_tokens(checkpoint)], device=where), torch.arange(PROBE_TOKENS, device=where)
    return forward(model, ids, positions[None], None)
