"""torch.export records one computation for all data, so nothing may be decided by looking at numbers."""

import torch

# torch 2.6 says only that something records: torch.compile, which may look, or torch.export
is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
