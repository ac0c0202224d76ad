"""A test whether torch.export is recording.

torch.export records one computation for all data, so no branch may depend on the values of tensors.
"""

import torch

# torch 2.6 does not tell torch.export from torch.compile, where values may decide
is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
