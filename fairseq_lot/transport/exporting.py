"""Whether torch.export is recording: it records one computation for all data, so values must not decide anything."""

import torch

# torch 2.6 does not tell torch.export from torch.compile, where values may decide
is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
