"""How many kernels a GPU would be sent: leaf operations, counted on the CPU."""

from torch.profiler import ProfilerActivity, profile

# Operations that make no kernel: views, allocations, and questions about a tensor.
_NO_KERNEL = {
    f"aten::{name}"
    for name in (
        "_reshape_alias _unsafe_view _to_copy alias as_strided broadcast_tensors chunk contiguous detach detach_ diagonal "
        "empty empty_like empty_strided expand expand_as expand_symint flatten full full_like is_nonzero is_pinned item "
        "lift_fresh movedim narrow new_empty new_empty_strided new_full new_zeros numel ones ones_like output_nr permute "
        "record_stream reshape resize_ resolve_conj resolve_neg result_type scalar_tensor select set_ size slice split "
        "split_with_sizes squeeze stride t to transpose type_as unbind unflatten unfold unsqueeze view view_as zeros "
        "zeros_like _local_scalar_dense"
    ).split()
}


def launches(work) -> int:
    """The leaf operations of a call, after one call that is not counted."""
    work()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        work()
    operations = [event for event in record.events() if event.name.startswith("aten::")]
    inside = {}
    for event in operations:
        inside.setdefault(id(event.cpu_parent), []).append(event)
    found = 0

    def has_kernel(event) -> bool:
        nonlocal found
        # the list comes first: every operation inside is to be looked at
        if any([has_kernel(other) for other in inside.get(id(event), [])]):
            return True
        if event.name in _NO_KERNEL:
            return False
        found += 1
        return True

    for event in operations:
        if event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::"):
            has_kernel(event)
    return found
