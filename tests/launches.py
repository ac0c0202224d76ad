"""The number of kernels that a call would launch on a GPU: its leaf operations, counted on the CPU."""

import re

from torch.profiler import ProfilerActivity, profile

# operations that launch no kernel: views, allocations and queries of a tensor's properties
_NO_KERNEL = re.compile(
    "aten::(_local_scalar_dense|_reshape_alias|_to_copy|_unsafe_view|alias|as_strided|broadcast_tensors|chunk|contiguous"
    "|detach_?|diagonal|(new_)?(empty|full|ones|zeros)(_like|_strided)?|expand(_as)?|flatten|is_nonzero|is_pinned|item"
    "|lift_fresh|movedim|narrow|numel|output_nr|permute|record_stream|reshape|resize_|resolve_(conj|neg)|result_type"
    "|scalar_tensor|select|set_|size|slice|split(_with_sizes)?|squeeze|stride|t|to|transpose|type_as|unbind|unflatten"
    "|unfold|unsqueeze|view(_as)?)"
)


def launches(work) -> int:
    """The number of leaf operations of ``work()`` that launch a kernel; an uncounted first call warms up."""
    work()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        work()
    operations = [event for event in record.events() if event.name.startswith("aten::")]
    inside = {}
    for event in operations:
        inside.setdefault(id(event.cpu_parent), []).append(event)

    def kernels(event):
        return sum(map(kernels, inside.get(id(event), []))) or (_NO_KERNEL.fullmatch(event.name) is None)

    names = {id(event) for event in operations}
    return sum(kernels(event) for event in operations if id(event.cpu_parent) not in names)
