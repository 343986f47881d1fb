"""Opens the weights of a checkpoint by the format in which it stores them."""

from __future__ import annotations

from common.checkpoint.files import Checkpoint
from common.quantization.awq import open_awq
from common.quantization.compressed import open_compressed
from common.quantization.fp8 import open_fp8
from common.quantization.gptq import open_gptq
from common.quantization.mxfp4 import open_mxfp4
from common.quantization.source import TensorFiles, WeightSource


def open_source(checkpoint: Checkpoint) -> WeightSource | None:
    """Return the weights of a quantized checkpoint, None if it is not quantized. Raises StartError if they cannot be
    read."""
    method, settings = checkpoint.format.method, checkpoint.format.settings
    if not method:
        return None
    if method == "gguf":
        from common.checkpoint.gguf import open_gguf  # its library is slow to import, and needs others
        from common.quantization.gguf import open_gguf_weights

        return open_gguf_weights(open_gguf(checkpoint.weight_files))
    files = TensorFiles(checkpoint.weight_files)
    match method:
        case "gptq":
            return open_gptq(files, settings)
        case "awq":
            return open_awq(files, settings)
        case "compressed-tensors":
            return open_compressed(files, settings)
        case "fp8" | "fbgemm_fp8":
            return open_fp8(files, settings)
        case "mxfp4":
            return open_mxfp4(files)
    raise ValueError(f"no reader for {method}")
