"""The kernels compiled for sm_80 and sm_90, without a GPU, by Triton and the assembler that comes with it."""

import re
import subprocess

import pytest

triton = pytest.importorskip("triton", reason="no triton: pip install -e '.[kernels-test]'")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fairseq_lot.kernels import (  # noqa: E402
    convolution,
    lot,
    near_far,
    near_far_expected,
    near_far_step,
    sinkhorn,
    sinkhorn_attention,
)

# tensors of the inputs' dtype; all others are float32
INPUTS = {"Q", "K", "V", "Z", "GRAD_O", "GRAD_Q", "GRAD_K", "GRAD_V"}
OUTPUT = lot.query_forward
OTHERS = {"PADS": "u8", "POSITIONS": "i64", "ARRIVED": "i32"}  # by the last word of a name
NUMBERS = {"scale": "fp32", "rounding": "fp32", "natural": "fp32", "no_mass": "fp32", "dropout": "fp32"}
# bytes of registers that a thread of a backward kernel may spill; a forward kernel spills none. Triton 3.8 spills at
# most 132 with 32 pivots; with 64 the assembler of sm_80 spills 3,204
FEW, MANY = 256, 4096
SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes of shared memory for one program

pytestmark = pytest.mark.slow


def resources(kernel, target, dtype, warps, folder, *, typed=None, doubles=(), stages=3, **constants):
    """Bytes spilled by a thread and bytes of shared memory of a program.

    ``typed`` names the tensors of the inputs' dtype, ``doubles`` the tensors of float64.
    """
    typed = typed or (INPUTS | {"OUT"} if kernel is OUTPUT else INPUTS)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, aligned = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.isupper():
            kind = OTHERS.get(name.rpartition("_")[2], "fp32")
            signature[name] = f"*{dtype if name in typed else 'fp64' if name in doubles else kind}"
            aligned[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = NUMBERS.get(name, "i32")
            if name in ("d", "dv") or re.fullmatch("s[qkvdxy][bhn]", name):
                aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", target, 32), options={"num_warps": warps, "num_stages": stages}
    )
    ptx, architecture = folder / "kernel.ptx", f"sm_{target}a" if target == 90 else f"sm_{target}"
    ptx.write_text(compiled.asm["ptx"])
    command = [get_ptxas(target).path, "-v", f"--gpu-name={architecture}", ptx, "-o", folder / "kernel.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = int(re.search(r"(\d+) bytes spill stores", report)[1])
    return spilled, compiled.metadata.shared


def check(kernel, target, *arguments, **constants):
    """Assert that a kernel of LOT or of the solver stays within the limits of spilled bytes and shared memory."""
    spilled, shared = resources(kernel, target, *arguments, **constants)
    if kernel.__name__.endswith("_forward"):
        assert spilled == 0
    else:
        assert spilled <= (MANY if constants["R"] == 64 and target == 80 else FEW)
    assert shared <= SHARED[target]


FLAGS = {"TOKENS_FIRST": True, "VALUES": True, "BEGIN": True, "FINISH": True, "HAS_PADS": True}
WHOLE, STEPS = {**FLAGS, "SPLIT": False}, {"BEGIN": False, "FINISH": False}
PARTS = {  # all launches of a pass where tokens are split
    "key_forward": [{}],
    "query_forward": [{}],
    "query_backward": [{**STEPS, "BEGIN": True}, STEPS, {**STEPS, "FINISH": True}],
    "key_backward": [{**STEPS, "BEGIN": True}, STEPS, {**STEPS, "FINISH": True}],
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize(("r", "d", "dtype"), [(32, 64, "fp16"), (32, 64, "fp32"), (32, 128, "fp16"), (64, 64, "bf16")])
@pytest.mark.parametrize("kernel", ["key_forward", "query_forward", "query_backward", "key_backward"])
def test_lot(kernel, r, d, dtype, target, tmp_path):
    sizes = {"R": r, "D": d, "DV": d, "BLOCK": lot.BLOCK, "PRECISION": "tf32x3", "DROPS": dtype == "bf16"}
    check(getattr(lot, kernel), target, dtype, lot.WARPS, tmp_path, **WHOLE, **sizes)


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize(
    ("kernel", "flags"), [(kernel, flags) for kernel, every in PARTS.items() for flags in every], ids=str
)
def test_lot_with_tokens_split(kernel, flags, target, tmp_path):
    sizes = {"R": 32, "D": 64, "DV": 64, "BLOCK": lot.BLOCK, "PRECISION": "tf32x3", "DROPS": False}
    check(getattr(lot, kernel), target, "fp16", lot.WARPS, tmp_path, **{**FLAGS, **flags}, **sizes, SPLIT=True)


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("r", [32, 64])
@pytest.mark.parametrize("kernel", ["pass_of_both", "merge_values"])
def test_lots_passes_and_merge(kernel, r, target, tmp_path):
    sizes = {"R": r, "D": 64, "DV": 64, "BLOCK": lot.BLOCK, "PRECISION": "tf32x3"}
    sizes |= dict.fromkeys(("QUERIES_FIRST", "KEYS_FIRST", "HAS_QUERY_PADS", "HAS_KEY_PADS"), True)
    spilled, shared = resources(getattr(lot, kernel), target, "fp16", lot.WARPS, tmp_path, **sizes)
    assert spilled == 0
    assert shared <= SHARED[target]


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("held", [32, 1024])
@pytest.mark.parametrize("exact", [False, True], ids=["tokens exact", "pivots exact"])
@pytest.mark.parametrize("kernel", ["solve_forward", "solve_backward"])
def test_solver(kernel, exact, held, split, target, tmp_path):
    block, warps, _ = sinkhorn.blocks_of(held)
    sizes = {"R": held, "BLOCK": block, "PIVOTS_EXACT": exact, "SPLIT": split}
    check(getattr(sinkhorn, kernel), target, "fp32", warps, tmp_path, **FLAGS, **sizes, ssm=1, scm=1, sgm=1)


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kernel", ["convolve", "convolve_backward"])
def test_convolution(kernel, width, target, tmp_path):
    sizes = {"D": width, "BLOCK": convolution.ENTRIES // width, "typed": {"V", "W", "GRAD_V"}}
    spilled, shared = resources(getattr(convolution, kernel), target, "fp16", convolution.WARPS, tmp_path, **sizes)
    assert spilled == 0
    assert shared <= SHARED[target]


NEAR_FAR_TYPED = {"Q", "K", "V", "Z", "OUT", "GRAD_OUT", "GRAD_Q", "GRAD_K", "GRAD_V", "TO_Z"}
FORMS = {"tangents": {"TANGENTS": True}, "alibi": {"CAUSAL": True, "HAS_SLOPES": True}, "short": {"BEYOND": False}}
NEAR_FAR = {  # by form
    "tangents": ["summarise_keys", "merge", "attend", "query_gradients", "key_gradients"],
    "alibi": ["merge", "attend", "query_gradients", "key_gradients"],
    "short": ["attend", "all_gradients"],
}
# Bytes that a thread of a backward kernel may spill, by width: somewhat more than Triton spills.
NEAR_FAR_SPILLS = {64: 1280, 128: MANY}


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize(
    ("kernel", "form", "width"),
    [
        (kernel, form, width)
        for form, kernels in NEAR_FAR.items()
        for width in ([64, 128] if form == "tangents" else [64])
        for kernel in kernels
    ],
)
def test_near_far(kernel, form, width, target, tmp_path):
    chunk, tile = (32, 16) if target == 80 and width > 64 else (near_far.CHUNK, near_far.TILE)
    sizes = {"R": 32, "C": chunk, "T": tile, "D": width, "DV": width, "N": near_far.MERGED, "PRECISION": "tf32"}
    flags = dict.fromkeys(("TANGENTS", "CAUSAL", "HAS_SLOPES", "TO_KEYS", "TWO_SIDES"), False)
    flags |= {"BEYOND": True, "HAS_PADS": True}
    warps = 4 if kernel == "merge" else near_far.warps(width)
    constants = flags | FORMS[form] | sizes | {"typed": NEAR_FAR_TYPED, "stages": near_far.STAGES}
    spilled, shared = resources(getattr(near_far, kernel), target, "fp16", warps, tmp_path, **constants)
    assert spilled <= (NEAR_FAR_SPILLS[width] if kernel.endswith("gradients") else 0), spilled
    assert shared <= SHARED[target]


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("width", [64, 128])
def test_a_step_of_near_far(width, target, tmp_path):
    flags = dict.fromkeys(("LEAVES", "HAS_FAR", "HAS_MASS", "HAD_MASS", "HAS_PADS", "HAS_SLOPES"), True)
    constants = {**flags, "R": 32, "W": 16, "D": width, "DV": width, "typed": {"Q", "K", "V", "Z", "OUT"}}
    spilled, shared = resources(near_far_step.next_token, target, "fp16", near_far_step.WARPS, tmp_path, **constants)
    assert spilled == 0
    assert shared <= SHARED[target]


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("width", [64, 128])
def test_a_step_of_near_far_at_cross(width, target, tmp_path):
    constants = {"TANGENTS": True, "HAS_PADS": True, "R": 32, "W": 32, "D": width, "DV": width, "typed": {"Q", "OUT"}}
    constants["doubles"] = {"PROBES", "CONSTANTS", "LOG_SUMS", "POSITIONS"}
    kernel, warps = near_far_expected.attend_expected, near_far_expected.WARPS
    spilled, shared = resources(kernel, target, "fp16", warps, tmp_path, **constants)
    assert spilled == 0
    assert shared <= SHARED[target]


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kernel", ["expected_forward", "expected_backward"])
def test_near_far_at_cross_with_gradients(kernel, width, dtype, target, tmp_path):
    constants = {
        "HAS_PADS": True,
        "R": 32,
        "W": 32,
        "D": width,
        "DV": width,
        "typed": {"Q", "OUT", "GRAD_OUT", "GRAD_Q"},
    }
    constants["doubles"] = {"QUERY_LOGS", "LOG_SUMS", "POSITIONS", "GRAD_LOGS"}
    chosen, warps = getattr(near_far_expected, kernel), near_far_expected.WARPS
    spilled, shared = resources(chosen, target, dtype, warps, tmp_path, **constants)
    assert spilled <= (FEW if width == 128 else 0), spilled
    assert shared <= SHARED[target]


SIZES = {"D": 64, "DV": 64, "PRECISION": "tf32x3", "LEARNT": True, "PRIOR": True, "DROPS": False, "VALUES": True}
EITHER = {f"{side}HAS_{of}PADS": True for side, of in (("", "QUERY_"), ("", "KEY_"), ("X_", ""), ("Y_", ""))}
TYPED = {"Q", "K", "V", "X", "Y", "GRAD_O", "GRAD_Q", "GRAD_K", "GRAD_V"}
#: bytes that a thread may spill, forward and backward, by length or dtype: somewhat more than Triton spills
SHORT_SPILLS = {32: (0, 0), 64: (0, 8192), 128: (1024, 51200)}
LONG_SPILLS = {"fp16": 128, "fp32": 768}


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("n", [32, 64, 128])
@pytest.mark.parametrize("kernel", ["short_forward", "short_backward"])
def test_short_attention(kernel, n, target, tmp_path):
    backward = kernel == "short_backward"
    warps = sinkhorn_attention.short_warps(n, n)[backward]
    constants = {**SIZES, **EITHER, "N": n, "M": n, "typed": TYPED if backward else {*TYPED, "OUT"}}
    spilled, shared = resources(getattr(sinkhorn_attention, kernel), target, "fp16", warps, tmp_path, **constants)
    assert spilled <= SHORT_SPILLS[n][backward], spilled
    assert shared <= SHARED[target]


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("kernel", ["reduce_side", "undo_update", "first", "queries", "keys"])
def test_long_attention(kernel, dtype, target, tmp_path):
    chosen, kind = getattr(sinkhorn_attention, kernel, None), {}
    if chosen is None:
        chosen, kind = sinkhorn_attention.gradients, {"KIND": kernel}
    constants = {**SIZES, **EITHER, **kind, "BLOCK": sinkhorn_attention.BLOCK, "typed": TYPED}
    spilled, shared = resources(chosen, target, dtype, sinkhorn_attention.WARPS, tmp_path, **constants)
    assert spilled <= (LONG_SPILLS[dtype] if kind else 0), spilled
    assert shared <= SHARED[target]
