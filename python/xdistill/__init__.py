"""xdistill: distillation losses, tokenizers, alignment and checkpoints of xdistill.h.

    import xdistill            arrays of NumPy and others; tokenizers, projections, caches, safetensors
    import xdistill.torch      losses with gradients for PyTorch

`xdistill.api` has every struct, enum and constant of the header, and xdistill.lib every function, for ctypes.
"""

from . import _api as api
from ._arrays import array
from ._library import Context, Error, context, lib, release_memory, use
from .text import (Alignment, Chunks, Encoding, Projection, TeacherCache, TeacherCacheWriter, Tokenizer, align, chunks)
from .weights import Weights, save_weights
from . import losses

__version__ = api.VERSION
__all__ = ["Alignment", "Chunks", "Context", "Encoding", "Error", "Projection", "TeacherCache", "TeacherCacheWriter",
           "Tokenizer", "Weights", "align", "api", "array", "chunks", "context", "lib", "losses", "release_memory",
           "save_weights", "use"]
