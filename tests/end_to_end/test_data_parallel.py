"""Data-parallel training: two processes with half a batch each compute the gradients of one with the whole batch."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from fairseq_lot.attention.registry import MECHANISMS
from tests.conftest import softmax_in_its_own_dtype
from tests.end_to_end.conftest import BIN, train, weights_of
from tests.plug_and_play import in_memory

FAMILIES = ("lot_transformer", "diff_transformer")
CASES = {f"{arch}-{name}": (arch, {"attention": name}) for name in MECHANISMS for arch in FAMILIES}
ALL_SITES = {"attention_sites": "encoder,cross,decoder"}
EVERYWHERE = {"attention": "lot", **ALL_SITES}
CASES |= {
    "lot-everywhere": ("lot_transformer", EVERYWHERE),
    "differential-lot-everywhere": ("diff_transformer", EVERYWHERE),
    "near_far-everywhere": ("lot_transformer", {"attention": "near_far", **ALL_SITES}),
    "near_far-exact": ("lot_transformer", {"attention": "near_far", **ALL_SITES, "near_far_exact_up_to": 512}),
    "lot-one-update": ("lot_transformer", {**EVERYWHERE, "lot_num_updates": 1}),
    "lot-convolution": ("lot_transformer", {"attention": "lot", "lot_conv_kernel": 3}),
    "learnt-temperatures": ("lot_transformer", {"attention": "sinkhorn", "sinkhorn_learn_epsilon": True}),
    "learnable-slices": ("lot_transformer", {"attention": "esp", "esp_slicer": "learnable"}),
    "learnable-slices-hard": ("lot_transformer", {"attention": "esp", "esp_slicer": "learnable", "esp_hard": True}),
}


def loss_and_gradients(model, task, sample):
    """The summed cross-entropy of a batch; its gradients are added to the parameters'."""
    logits, _ = model(**sample["net_input"])
    assert logits.dtype == torch.float64
    target, pad = sample["target"].flatten(), task.source_dictionary.pad()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target, ignore_index=pad, reduction="sum")
    loss.backward()
    return loss.detach()


@contextlib.contextmanager
def group(folder, rank, size):
    """Context manager: this process belongs to a gloo group of ``size`` processes."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", world_size=size, rank=rank)
    try:
        yield
    finally:
        dist.destroy_process_group()


@softmax_in_its_own_dtype()
def check(name, rank, size):
    """Check, as one process of a group, that the group's loss and gradients are those of the whole batch alone."""
    arch, options = CASES[name]
    loaded = in_memory.load(arch, **options)
    model = loaded.model.double().train()
    sample = loaded.batch(range(rank, 6, size))
    parallel = DistributedDataParallel(model)
    loss_and_gradients(parallel, loaded.task, sample)  # unused parameters in a first batch would stop a second
    model.zero_grad(set_to_none=True)
    loss = loss_and_gradients(parallel, loaded.task, sample)
    dist.all_reduce(loss)
    # DDP takes the mean over the processes, the loss is a sum
    gradients = {key: size * x.grad for key, x in model.named_parameters()}
    whole = in_memory.load(arch, **options)
    expected = loss_and_gradients(whole.model.double().train(), whole.task, whole.batch(range(6)))
    # rounding, 2e-16, of the loss, and of gradients up to 50: 1e-14, which ESP divides by t = 1e-3
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    expected_gradients = {key: x.grad for key, x in whole.model.named_parameters()}
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-8, atol=1e-9)
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-2


@pytest.mark.parametrize("name", CASES)
def test_a_group_of_one_process_computes_what_a_process_without_group_does(name, tmp_path):
    """A parameter without a gradient would make DDP fail at the second batch."""
    with group(tmp_path, 0, 1):
        check(name, 0, 1)


def check_all(rank, folder):
    """Check all cases in one of two processes."""
    torch.set_num_threads(1)
    with group(folder, rank, 2):
        for name in CASES:
            check(name, rank, 2)
        dist.barrier()


@pytest.mark.slow
def test_two_processes_with_half_a_batch_each_compute_what_one_does(tmp_path):
    mp.spawn(check_all, args=(str(tmp_path),), nprocs=2)


@pytest.mark.slow
def test_torchrun_trains_as_one_process_that_accumulates(data, tmp_path):
    """The line for several GPUs of docs/training.md, with gloo. The two processes stop and go on after three updates.

    SGD, because Adam would divide by gradients that are almost 0.
    """
    flags = ("--arch", "lot_transformer_small", "--optimizer", "sgd", "--lr", 0.1, "--dropout", 0, "--clip-norm", 0)
    one = train(data / "bin", tmp_path / "one", *flags, "--update-freq", 2, updates=6)
    parallel = ("--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp", "--fast-stat-sync")
    launcher = ("torchrun", "--nproc_per_node", 2, BIN / "fairseq-train")
    for updates in (3, 6):
        train(data / "bin", tmp_path / "two", *flags, *parallel, updates=updates, launcher=launcher)
    start = train(data / "bin", tmp_path / "start", *flags, updates=1)
    one, two, start = (weights_of(path) for path in (one, tmp_path / "two" / one.name, start))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
    name = "encoder.layers.0.fc1.weight"
    assert (start[name] - one[name]).abs().max() > 1e-3, "nothing was trained"


@pytest.mark.slow
def test_several_processes_show_why_they_refuse(data, tmp_path):
    """fairseq silences ``print`` in all processes but the first; torch's hook drops what ours wrote before it exits."""
    flags = ("--arch", "lot_transformer_small", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp")
    train(data / "bin", tmp_path, *flags[:2], updates=2)
    with pytest.raises(AssertionError, match=r"fairseq_lot: error: .*AMPOptimizer"):
        launcher = ("torchrun", "--nproc_per_node", 2, BIN / "fairseq-train")
        train(data / "bin", tmp_path, *flags, "--amp", updates=4, launcher=launcher)
